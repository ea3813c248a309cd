"""A start that differs from the run in its folder: what of it is refused, and what is only told."""

from contextlib import suppress

from common.checkpoint import Damaged, checkpoints, read_facts
from common.errors import UserError, say
from common.world import MAY_DIFFER


def refuse_changes(opts, first, ours, foreign):
    """Raise a UserError with both values of what may not change; tell what may.

    `first` is what options.json has, `ours` what this start has. `foreign` is a checkpoint of another run.
    """
    wrong = opts.compare(first["options"])
    changed = []
    known = first["pinned"] | first["code"]
    for name, now in (ours["pinned"] | ours["code"]).items():
        was = known.get(name, now)  # a run without --virtual-ranks pins nothing, and is refused above
        if was != now:
            differences = changed if name in MAY_DIFFER or name in ours["code"] else wrong
            differences.append(f"{name} was {was}, now {now}")
    if first["data"] != ours["data"]:
        difference = f"data's fingerprint was {first['data'][:12]}, now {ours['data'][:12]}"
        if opts.accept_data_change:
            changed.append(difference)
        else:
            wrong.append(
                f"the {difference} (with --accept-data-change the epoch begins again with the new data)"
            )
    opts.refuse_another_run(wrong)
    if foreign:
        path = opts.run_dir / "options.json"
        raise UserError(f"{foreign} is of another run than {path}\nmove it away, or use another --run-dir")
    for difference in changed:
        say(f"the {difference}: from here on the bits may be others")


def facts_of_the_newest(opts, reason, run):
    """Return what the newest checkpoint has of a run whose options.json is damaged; UserError without one."""
    path = opts.run_dir / "options.json"
    for step, folder in checkpoints(opts.run_dir):
        with suppress(Damaged, OSError):
            manifest, facts = read_facts(step, folder)
            if manifest["run"] == run:
                say(f"{path}: {reason}; made again from the newest checkpoint")
                return facts["origin"]
    raise UserError(
        f"{path}: {reason}; without it this could be another run\n"
        f"bring it back; or --run-dir NEW --resume {opts.run_dir} begins another run"
    ) from reason
