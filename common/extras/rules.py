"""What is told of flags: which are unknown, which contradict each other, this world or this machine's files.

No torch here: a typo answers at once. A first run gives no flag that has a rule (FIRST_RUN in
options/parser.py).
"""

import ast
import os
import re
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from common.errors import UserError, blamed, did_you_mean
from common.options import DATASETS, FLAGS, flag_of
from common.place import meeting_variables

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
MEANT = {  # by flags that others have
    "--batch-size": "--global-batch-size, the samples of a step over all processes",
    "--learning-rate": "--lr",
    "--precision": "--amp bf16",
    "--gpus": "torchrun --nproc_per_node=N, which starts a process for each GPU",
    "--nproc": "torchrun --nproc_per_node=N, before the name of the script",
}
GONE = {"--stages", "--shard", "--recompute"}  # flags of a net in parts


def check_flags(opts, world):
    """Refuse flags that contradict each other or cannot take effect; a `world` of 0 is not known yet."""
    check_arguments(opts, world)
    if opts.optimizer_args:
        keywords(opts.optimizer_args)
    of_datasets = {flag for _, flags in DATASETS.values() for flag in flags}
    for flag in map(flag_of, sorted(of_datasets.difference(opts.flags_of_dataset))):
        if is_given(flag, opts):
            raise UserError(f"{flag} cannot take effect with --dataset {opts.dataset}\nleave it out")
    if opts.min_lr >= opts.lr:
        lower = " or lower --min-lr" if opts.min_lr else ""
        raise UserError(f"--lr {opts.lr} is not above --min-lr {opts.min_lr}\nraise --lr{lower}")


def check_arguments(opts, world):
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
    if Path(opts.resume).resolve().is_relative_to((opts.run_dir / "checkpoints").resolve()):
        raise UserError(
            f"--resume {opts.resume}: this run resumes from its newest checkpoint\n"
            "leave it out to resume there; to go back to a step, give a --run-dir of its own too"
        )
    for flag, path, is_there in (
        ("--resume", opts.resume, os.path.isdir),
        ("--init-from", opts.init_from, os.path.isfile),
    ):
        if path not in ("", "auto") and not is_there(path):
            raise UserError(
                f"{flag}: {path!r} is not there\n"
                "give the folder of a checkpoint to --resume, a file of weights to --init-from"
            )


def check_name(option, name, known):
    """Refuse a name of this option that is not among the known ones, or a file that is not there."""
    if ".py" in name:
        path = name.rpartition(":")[0]
        if not Path(path).is_file():
            missing = f"file {path!r}" if path else "function"
            raise UserError(
                f"{flag_of(option)} {name}: there is no {missing}\nwrite path/to/file.py:function"
            )
        return
    listed = ", ".join(known)
    if option == "model":
        known = [*known, *torchvision_models()]
        listed += ", those of torchvision where it is installed"
    if name not in known:
        raise UserError(
            f"{flag_of(option)}: {name!r} is unknown{did_you_mean(name, known)}\n"
            f"there are {listed}, and path/to/file.py:function"
        )


def torchvision_models():
    """Read the names where they stand: to import them takes seconds; none if torchvision is not there."""
    spec = find_spec("torchvision")
    if not spec or not spec.origin:
        return []
    files = Path(spec.origin).parent.glob("models/*.py")
    texts = [path.read_text(encoding="utf-8") for path in files]
    return re.findall(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)", "\n".join(texts), re.MULTILINE)


def refuse_flag(word, script):
    """Refuse a flag that a script lacks."""
    flag = word.partition("=")[0]
    if flag in FLAGS:
        owners = " and ".join(f"train_{owner}.py" for owner in FLAGS[flag].metadata["scripts"])
        raise UserError(f"{flag} cannot take effect in {script}\nit belongs to {owners}")
    if flag in GONE:
        raise UserError(
            f"{flag} is gone: a process holds a whole net, over several devices with train_mp.py\n"
            "to bring over weights of a run with parts: python -m common.checkpoint RUN --export FILE\n"
            "by the version that wrote it, then --init-from FILE here"
        )
    hint = f"; did you mean {MEANT[flag]}?" if flag in MEANT else did_you_mean(flag, FLAGS)
    raise UserError(f"unknown argument {word!r}{hint}\nsee {script} --help")


def refuse_to_meet(siblings):
    """Refuse a process that has siblings which it does not know of, or else cannot meet the others."""
    if siblings:
        raise UserError(
            f"{siblings} without WORLD_SIZE: each task would train the whole run alone\n"
            "give each RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT,\n"
            "or start one task a machine, with launch/torchrun.py (as launch/slurm.sbatch does)"
        )
    raise UserError(
        f"ranks cannot meet with {meeting_variables()}\n"
        "start with torchrun, or set RANK (0 to WORLD_SIZE - 1), WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )


def keywords(text, besides=()):
    """Read {name: value} from the text `name=value,name=value`; none may be `besides`, by a flag."""
    with blamed(f"--optimizer-args {text!r}", "write eps=1e-6,amsgrad=True"):
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("an argument has no name")
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    for name in values:
        if name in besides:
            raise UserError(
                f"--optimizer-args: {name} is a flag, too\nuse the flag: --lr, --momentum or --weight-decay"
            )
    return values
