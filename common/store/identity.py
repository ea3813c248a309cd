"""What a run is: RUN/options.json holds its options, its data, and what decides its bits.

From this start's values to what that file shall hold from now on, or to a UserError with both values of what
differs.
"""

from contextlib import suppress

from common.checkpoint import Damaged, checkpoints, read_manifest, read_sealed
from common.errors import UserError, say
from common.options import with_folder
from common.world import MAY_DIFFER, bit_facts


def identify(opts, data, code, device, writer):
    """Return what this run is, for JSON; UserError if RUN/options.json, or a checkpoint, has other values.

    `data` is the fingerprint of its data, `code` has that of each file of a user's. The options may change as
    long as nothing is saved, the free ones always.
    """
    pinned = bit_facts(opts, device)
    options = {name: with_folder(value) for name, value in opts.to_json().items()}
    ours = {"options": options, "data": data, "pinned": pinned, "code": code}
    if not opts.is_bound:
        return ours
    path = opts.run_dir / "options.json"
    foreign = foreign_checkpoint(opts, writer.run)
    try:
        first = read_sealed(path)
    except Damaged as reason:
        origin = next((facts["origin"] for facts in writer.readable()), None)
        if origin is None:
            raise UserError(
                f"{path}: {reason}; without it this could be another run\n"
                f"bring it back; or --run-dir NEW --resume {opts.run_dir} begins another run"
            ) from reason
        say(f"{path}: {reason}; made again from the newest checkpoint")
        first = ours | origin
    wrong = opts.compare(first["options"])
    changed = []
    known = first["pinned"] | first["code"]
    for name, now in (pinned | code).items():
        was = known.get(name, now)  # a run without --virtual-ranks pins nothing, and is refused above
        if was != now:
            differences = changed if name in MAY_DIFFER or name in code else wrong
            differences.append(f"{name} was {was}, now {now}")
    if first["data"] != data:
        difference = f"data's fingerprint was {first['data'][:12]}, now {data[:12]}"
        if opts.accept_data_change:
            changed.append(difference)
        else:
            wrong.append(
                f"the {difference} (with --accept-data-change the epoch begins again with the new data)"
            )
    opts.refuse_another_run(wrong)
    if foreign:
        raise UserError(f"{foreign} is of another run than {path}\nmove it away, or use another --run-dir")
    for difference in changed:
        say(f"the {difference}: from here on the bits may be others")
    if opts.virtual_ranks:
        ours["code"] = first["code"]
    return ours | {"pinned": first["pinned"]}


def foreign_checkpoint(opts, run):
    """Return a checkpoint of another run, which this one would delete some day; UserError for another format.

    One that is kept for ever, as one --keep-every so many steps, is compared if it is loaded.
    """
    for step, folder in checkpoints(opts.run_dir):
        if opts.keep_every and step % opts.keep_every == 0:
            continue
        with suppress(Damaged, OSError):
            if read_manifest(folder)["run"] != run:
                return folder
    return None
