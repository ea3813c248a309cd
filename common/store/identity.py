"""What a run is: RUN/options.json holds its options, its data, and what decides its bits.

From this start's values to what that file shall hold from now on, or to a UserError with both values of what
differs.
"""

from contextlib import suppress

from common.checkpoint import Damaged, checkpoints, read_manifest, read_sealed
from common.options import extra, with_folder
from common.world import bit_facts


def identify(opts, data, code, device, run):
    """Return what this run is, for JSON; UserError if RUN/options.json, or a checkpoint, has other values.

    `data` is the fingerprint of its data, `code` has that of each file of a user's, and `run` names it in a
    manifest. The options may change as long as nothing is saved, the free ones always.
    """
    pinned = bit_facts(opts, device)
    options = {name: with_folder(value) for name, value in opts.to_json().items()}
    ours = {"options": options, "data": data, "pinned": pinned, "code": code}
    if not opts.is_bound:
        return ours
    foreign = foreign_checkpoint(opts, run)
    try:
        first = read_sealed(opts.run_dir / "options.json")
    except Damaged as reason:
        first = ours | extra("lost_options")(opts, reason, run)
    known = first["pinned"] | first["code"]
    is_same = first["data"] == data and known | pinned | code == known and not opts.compare(first["options"])
    if foreign or not is_same:
        extra("changed")(opts, first, ours, foreign)
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
