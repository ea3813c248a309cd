"""Which flags contradict each other, this world or this machine's files; each such pair is an error.

No torch here. A first run gives none of these flags (FIRST_RUN in options/parser.py), and imports no rule.
"""

import os
from fnmatch import fnmatchcase

from common.errors import UserError
from common.options import DATASETS, Options, extra, flag_of

CLASHES = (  # the first cannot take effect with the second, because ...
    ("--micro-batch-size", "--virtual-ranks", "a slice is one forward, so its size is already fixed"),
    ("--in-flight", "--virtual-ranks", "a slice is one forward and its backward"),
    ("--in-flight", "--micro-batch-size=0", "a rank's share is one forward"),
    ("--sync-bn", "--virtual-ranks", "statistics over all ranks would depend on their number"),
    ("--compile", "--virtual-ranks", "compiled code depends on the shapes a process saw, so on the world"),
    ("--cross-check", "--virtual-ranks=0", "without slices no two ranks compute the same bits"),
    ("--sync-bn", "--bad-samples", "it needs a sample in each forward of each rank"),
    ("--devices=*cuda*", "--device=cpu", "one asks for a GPU"),
    ("--devices=*cpu*", "--device=cuda", "one asks for none"),
    ("--patience", "--eval-every=0", "it counts evaluations"),
    ("--lr-schedule", "--optimizer=rprop", "it looks at lr once"),
    ("--warmup-epochs", "--optimizer=rprop", "it looks at lr once"),
    ("--min-lr", "--lr-schedule=constant", "nothing falls"),
    ("--min-lr", "--lr-schedule=*.py:*", "let the function do it"),
    ("--warmup-epochs", "--lr-schedule=*.py:*", "let the function do it"),
    ("--optimizer-args", "--optimizer=*.py:*", "let the function do it"),
    ("--no-decay-1d", "--optimizer=*.py:*", "let the function do it"),
    ("--no-decay-1d", "--weight-decay=0.0", "there is no decay"),
    ("--label-smoothing", "--task=*.py:*", "let the function do it"),
    ("--init-skip", "--init-from=", "nothing is taken over"),
    ("--init-from", "--resume", "both say where the weights come from"),
)


def check_flags(opts: Options, world: int) -> None:
    """Refuse flags that contradict each other or cannot take effect; a `world` of 0 is not known yet."""
    check_arguments(opts, world)
    if opts.optimizer_args:
        extra("optimizer_args")(opts.optimizer_args)
    of_datasets = {flag for _, flags in DATASETS.values() for flag in flags}
    for flag in map(flag_of, sorted(of_datasets.difference(opts.flags_of_dataset))):
        if is_given(flag, opts):
            raise UserError(f"{flag} cannot take effect with --dataset {opts.dataset}\nleave it out")
    if opts.min_lr >= opts.lr:
        lower = " or lower --min-lr" if opts.min_lr else ""
        raise UserError(f"--lr {opts.lr} is not above --min-lr {opts.min_lr}\nraise --lr{lower}")


def check_arguments(opts: Options, world: int) -> None:
    """Refuse what contradicts each other, this world, or this machine's files, also in Elastic(...)."""
    for flag, other, why in CLASHES:
        if is_given(flag, opts) and is_given(other, opts):
            raise UserError(f"{flag} cannot take effect with {other}: {why}\nleave out one of them")
    check_files(opts)
    check_world(opts, world)


def is_given(flag, opts):
    """Return whether a flag has a value, other than its default; or, as --flag=pattern, a value like this."""
    name, has_value, pattern = flag[2:].replace("-", "_").partition("=")
    value = getattr(opts, name)
    if has_value:
        return fnmatchcase(str(value), pattern)
    return value not in (0, getattr(type(opts), name))


def check_world(opts, world):
    """Refuse flags that need another number of processes."""
    if opts.script == "dp" and world > 1:
        raise UserError(
            f"train_dp.py is one process for many devices, but WORLD_SIZE={world}\n"
            "use train_ddp.py with torchrun, or start train_dp.py with python"
        )
    if opts.virtual_ranks and world > opts.virtual_ranks:
        raise UserError(
            f"WORLD_SIZE={world} is more than --virtual-ranks {opts.virtual_ranks}\n"
            f"start at most {opts.virtual_ranks} processes"
        )


def check_files(opts):
    """Refuse files and folders that are not there, before torch is imported."""
    for flag, path, is_there in (
        ("--resume", opts.resume, os.path.isdir),
        ("--init-from", opts.init_from, os.path.isfile),
    ):
        if path not in ("", "auto") and not is_there(path):
            raise UserError(
                f"{flag}: {path!r} is not there\n"
                "give the folder of a checkpoint to --resume, a file of weights to --init-from"
            )
