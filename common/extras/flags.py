"""Starts that need a look of their own: unknown flags and names, --optimizer-args, ranks that cannot meet.

No torch here: a typo answers at once, unless it may be the name of a net of torchvision.
"""

import ast
from collections.abc import Collection, Container
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError, blamed, did_you_mean
from common.options import FLAGS, flag_of
from common.place import meeting_variables

MEANT = {  # by flags that others have
    "--batch-size": "--global-batch-size, the samples of a step over all processes",
    "--learning-rate": "--lr",
    "--precision": "--amp bf16",
    "--gpus": "torchrun --nproc_per_node=N, which starts a process for each GPU",
    "--nproc": "torchrun --nproc_per_node=N, before the name of the script",
}
GONE = {"--stages", "--shard", "--recompute"}  # flags of a net in parts


def check_name(option: str, name: str, known: Collection[str]) -> None:
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


def torchvision_models() -> list[str]:
    """Return the names; none if torchvision is not there."""
    with suppress(ImportError):
        from torchvision import models

        return models.list_models(module=models)
    return []


def refuse_flag(word: str, script: str) -> None:
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


def refuse_to_meet(siblings: str) -> None:
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


def keywords(text: str, besides: Container[str] = ()) -> dict[str, Any]:
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
