"""Flags as one frozen dataclass, the run's identity, and functions of a user's own.

A flag is one field of Options: a restart may not change a `fixed` one, because it changes the result; it may
change a `free` one. Nothing here imports torch, so `--help` and a wrong flag answer at once.
"""

import argparse
import dataclasses
import functools
import gc
import hashlib
import inspect
import json
import math
import os
import re
import sys
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import UserError, blamed, did_you_mean, end, ready_streams, say
from common.options.rules import (
    DATASETS,
    OURS,
    check_files,
    check_names,
    check_together,
    check_world,
    flag_of,
    keywords,
    uses,
)
from common.place import die_with_the_parent, here, meeting_variables, note_that_it_waits

Values = dict[str, Any]  # of fields, by name
RATES = {  # torch's own where they are not 1e-3; sgd has ours; tests/training compares them with torch
    "sgd": 0.05,
    "adadelta": 1.0,
    "adafactor": 0.01,
    "adagrad": 0.01,
    "adamax": 0.002,
    "asgd": 0.01,
    "nadam": 0.002,
    "rmsprop": 0.01,
    "rprop": 0.01,
}
RATE = 1e-3
NUMBERS = {int: "a whole number", float: "a number"}
SHAPES: dict[object, str] = {int: "N", float: "X", tuple: "A,B"}  # of a value, in --help
NOT_INHERITED = {"resume", "max_steps", "eval_only"}  # by a --fork
OF_A_MACHINE = {  # may differ between the machines of one life
    "run_dir",
    "data_dir",
    "download",
    "workers",
    "device",
    "devices",
    "threads",
    "progress",
    "tensorboard",
    "debug",
}
SCRIPTS = {"train_dp.py": "dp", "train_mp.py": "mp"}  # any other is as train_ddp.py


def as_imagefolder(size: int) -> str:
    """What --dataset imagefolder does to a picture outside of training."""
    return (
        f"Resize({size * 256 // 224}), CenterCrop({size}), 0 to 1, "
        "less mean 0.485 0.456 0.406, by deviation 0.229 0.224 0.225"
    )


def free(default, text, group="", scripts="ddp dp mp", low=0, below=math.inf, choices=None, fixed=False):
    """A field of Options: a flag that may change between restarts; `group` opens a group of --help."""
    scripts = scripts.split()
    return dataclasses.field(default=default, metadata=locals())


def fixed(*args, **kwargs):
    """Like `free`, for a flag that changes the result: a restart with another value is refused."""
    return free(*args, **kwargs, fixed=True)


@dataclass(frozen=True)
class Options:
    """All flags with their values; those left open follow from the others (lr from the optimizer, ...)."""

    script: str = "ddp"  # ddp, dp or mp: not a flag

    run_dir: Path = free(None, "folder, identity of the run (default: runs/MODEL-DATASET)", "the run")
    resume: str = free("auto", "auto: the newest checkpoint that verifies; or a folder")
    fork: str = fixed("", "a run whose first --at steps this one shares, and its flags unless given")
    at: int = fixed(0, "the step at which this run leaves --fork")
    init_from: str = fixed("", "weights to begin with: a .pt or .safetensors file")
    init_skip: tuple = fixed((), "weights whose names begin with these start afresh, as fc.")
    freeze: tuple = fixed((), "weights whose names begin with these do not train: conv1.,layer1.")
    seed: int = fixed(0, "every random number follows from it")
    epochs: int = free(3, "how often each sample is seen; may be raised to go further", low=1)
    max_steps: int = free(0, "stop after so many steps in all; 0: no limit")
    patience: int = free(0, "stop after so many evaluations without a better one; 0: never")
    eval_only: bool = free(False, "evaluate the checkpoint and leave")

    model: str = fixed(
        "net",
        "for images: net, mlp, a torchvision name; for numbers: mlp; for words: lstm; for tokens: gpt, "
        "gpt:tiny|small|medium|LxHxD; or path/to/file.py:function",
        "model, data",
    )
    dataset: str = fixed(
        "digits", f"{', '.join(DATASETS)}, random:100x5, text:128, tokens:128, or path/to/file.py:function"
    )
    task: str = fixed(
        None,
        "what is minimised and shown: classify, tokens, or path/to/file.py:function "
        "(default: tokens for gpt, text and tokens, else classify)",
    )
    data_dir: str = free(
        "data", "where the dataset's files are: of imagefolder train/ and val/; text's own file"
    )
    image_size: int = fixed(224, f"side of a picture; evaluated after {as_imagefolder(224)}", low=8)
    vocab_size: int = free(0, "different tokens of train.bin and val.bin")
    download: bool = free(False, "fetch missing files (one process per machine does)")
    workers: int = free(None, "loading processes per rank for files (default: up to 4)")
    bad_samples: str = fixed(
        "stop", "an unreadable sample ends the run, or counts 0", scripts="ddp dp", choices=("stop", "skip")
    )
    accept_data_change: bool = free(
        False, "resume although the data has changed; with another number of samples the epoch begins again"
    )
    augment: str = fixed("auto", "random crops and flips that suit the dataset", choices=("auto", "none"))

    global_batch_size: int = fixed(64, "samples per step, over all processes", "optimization", low=1)
    virtual_ranks: int = fixed(
        0,
        "cut each global batch into so many fixed slices: the same model to the "
        "last bit at any number of processes up to that; 0: off",
        scripts="ddp mp",
    )
    micro_batch_size: int = fixed(0, "at most so many samples per forward; 0: a rank's whole share")
    optimizer: str = fixed(
        "adam",
        "a name of torch.optim, or path/to/file.py:function of (net, opts) that "
        "returns an optimizer; a group's `scale` multiplies its rate",
    )
    optimizer_args: str = fixed("", "more of its arguments, as betas=(0.9,0.95),amsgrad=True")
    lr: float = fixed(None, "learning rate (default: torch.optim's; 0.05 for sgd, 0.001 for a function)")
    momentum: float = fixed(None, "(default for sgd: 0.9)", below=1)
    weight_decay: float = fixed(0.0, "pull of the weights towards zero")
    no_decay_1d: bool = fixed(False, "no pull on weights of one dimension: biases and norms")
    lr_schedule: str = fixed(
        "constant",
        "how lr falls: constant, step, cosine, or path/to/file.py:function "
        "of (step, steps in all, opts) that returns a factor",
    )
    min_lr: float = fixed(0.0, "lr falls no lower than this")
    warmup_epochs: float = fixed(0.0, "epochs in which lr first rises linearly")
    label_smoothing: float = fixed(0.0, "share of the target spread over all classes", below=1)
    clip_grad_norm: float = fixed(0.0, "longest gradient; 0: off")
    ema_decay: float = fixed(0.0, "averaged weights, as 0.999; 0: off", below=1)

    device: str = free("auto", "auto: a GPU, if any", "devices and speed", choices=("auto", "cpu", "cuda"))
    devices: tuple = free(
        (), "the devices this process drives (default: all GPUs), as cuda:0,cuda:1", scripts="dp mp"
    )
    stages: int = free(0, "cut the net over so many processes each; 0: all, or --devices", scripts="mp")
    balance: str = free("parameters", "where to cut: by parameters, or counts of pieces as 3,1", scripts="mp")
    shard: bool = free(False, "spread each stage's weights over its replicas (FSDP)", scripts="mp")
    recompute: bool = free(
        False, "compute activations again, not keep them; not if a net reads buffers it changes", scripts="mp"
    )
    amp: str = fixed("off", "mixed precision", choices=("off", "bf16", "fp16"))
    compile: bool = fixed(False, "torch.compile")
    tf32: bool = fixed(False, "matrix products in TF32: faster, less exact (GPUs only)")
    channels_last: bool = fixed(False, "memory layout for convolutions")
    sync_bn: bool = fixed(False, "batch norm statistics over all ranks (GPUs only)", scripts="ddp")
    threads: int = free(0, "CPU threads per process; 0: leave it to torch")

    save_every: int = free(500, "steps between checkpoints; 0: off", "saving and watching")
    save_seconds: int = free(300, "seconds between checkpoints; 0: off")
    keep: int = free(3, "checkpoints to keep", low=2)
    keep_every: int = free(0, "steps between checkpoints that are kept for good; 0: off")
    digest_every: int = free(
        0, "steps between fingerprints of the state in the ledger; 0: off", scripts="ddp dp"
    )
    eval_every: int = free(1, "epochs between evaluations; 0: only at the end")
    best: str = free(
        "",
        "which evaluation is kept: acc, -loss, ...; - if a lower one is better "
        "(default: acc, or the lowest loss)",
    )
    log_every: int = free(10, "steps between log lines", low=1)
    progress: str = free("auto", "a bar instead of lines; auto: on a terminal", choices=("auto", "on", "off"))
    tensorboard: bool = free(True, "no curves for TensorBoard in RUN/tb")
    hang_timeout: int = free(0, "seconds without progress; 0: 600", scripts="ddp mp")
    check_every: int = free(500, "steps between checks of replicas; 0: never", scripts="ddp mp")
    cross_check: int = free(0, "steps between slices that all ranks compute; 0: never", scripts="ddp")
    audit: bool = free(False, "note each rank's samples, for python -m common.ledger RUN --audit")
    debug: bool = free(False, "tracebacks and torch's own debug checks")
    show_scatter: bool = free(False, "print batch sizes inside and outside the model", scripts="dp")

    def __post_init__(self):
        """Defaults that follow from other flags."""
        folder = f"{Path(self.model).name}-{Path(self.dataset).name}"
        words = self.model.partition(":")[0] == "gpt" or self.dataset.partition(":")[0] in ("text", "tokens")
        cores = (os.cpu_count() or 1) // here().local_size
        left_open = {
            "run_dir": Path("runs", re.sub(r"[^\w.-]+", "-", folder)),
            "task": "tokens" if words else "classify",
            "lr": RATES.get(self.optimizer, RATE),
            "momentum": 0.9 if self.optimizer == "sgd" and "momentum" not in self.optimizer_args else None,
            "workers": min(4, max(1, cores)) if "workers" in uses(self.dataset) else 0,
        }
        for name, value in left_open.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def torch_optimizer(self) -> tuple[type, Values]:
        """(class of torch.optim, its arguments)."""
        from torch import optim  # not at the top: flags are read without torch

        kinds = {name.lower(): kind for name, kind in vars(optim).items() if isinstance(kind, type)}
        if self.optimizer not in kinds:
            raise UserError(
                f"--optimizer: {self.optimizer!r} is not in torch.optim"
                f"{did_you_mean(self.optimizer, kinds)}\n"
                "or write a function: path/to/file.py:function"
            )
        kind = kinds[self.optimizer]
        arguments = {"lr": self.lr}
        if self.weight_decay or "weight_decay" in inspect.signature(kind).parameters:
            arguments["weight_decay"] = self.weight_decay
        if self.momentum is not None:
            arguments["momentum"] = self.momentum
        more = keywords(self.optimizer_args)
        if self.optimizer in OURS and "foreach" not in more:
            more = {"fused": True} | more
        with blamed("--optimizer-args", "use the flag: --lr, --momentum or --weight-decay"):
            return kind, dict(**arguments, **more)  # not twice the same

    def identity(self) -> Values:
        """All fixed flags, as JSON gives them back, of a file the name; the same on every restart."""
        values = self.to_json()
        return {flag.name: plain(values[flag.name]) for flag in FLAGS.values() if flag.metadata["fixed"]}

    def of_all_ranks(self) -> Values:
        """{flag: value} of all that the machines of a life must have in common; of a file the name."""
        return {
            flag_of(name): plain(value) for name, value in self.to_json().items() if name not in OF_A_MACHINE
        }

    def compare(self, old: Values) -> list[str]:
        """Where these options contradict the `old` ones, those of an earlier start, in words."""
        return [
            f"{flag_of(name)} was {was!r}, now {now!r}"
            for name, now in self.identity().items()
            if (was := plain(old.get(name))) != now
        ]

    @property
    def is_bound(self) -> bool:
        """Whether a step of this run was saved: until then its options may change."""
        return any(re.match("step-|damaged-", name) for name in os.listdir(self.run_dir / "checkpoints"))

    def refuse_another_run(self, wrong: list[str]) -> None:
        """UserError if something is wrong, by `compare` or others."""
        if wrong:
            raise UserError(
                f"{self.run_dir} is another run: {'; '.join(wrong)}\n"
                "give the same options to go on with it, or another --run-dir\n"
                f"--run-dir NEW --resume {self.run_dir} begins another at its newest checkpoint"
            )

    def to_json(self) -> Values:
        """Every field, as json.dumps can write it."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def of_script(cls, given: Values, own: Values) -> "Options":
        """The options of a script of one's own: those `given` are read as flags are."""
        words = []
        for name, value in given.items():
            if isinstance(value, bool):
                words += [flag_of(name)] * (value != getattr(cls, name))
            elif value is not None:
                words.append(f"{flag_of(name)}={value}")
        opts = cls(**Parser(None, "ddp").read(words) | own)
        check_files(opts)
        return opts


def plain(value):
    """Of a file its name alone: it may lie elsewhere on another machine."""
    return value.rpartition("/")[2] if isinstance(value, str) else value


FLAGS = {flag_of(field.name): field for field in dataclasses.fields(Options)[1:]}


class Parser(argparse.ArgumentParser):
    """--help begins with the script's own commands; every mistake is a UserError."""

    def __init__(self, doc, script):
        super().__init__(
            prog=f"train_{script}.py",
            description=doc,
            usage=argparse.SUPPRESS,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=34, width=120
            ),
        )
        for flag, field in FLAGS.items():
            facts = field.metadata
            if facts["group"]:
                group = self.add_argument_group(facts["group"])
            if script in facts["scripts"]:
                group.add_argument(flag, dest=field.name, **how_to_read(field))

    def read(self, argv):
        """{field: value} of the flags in argv; --a_b counts as --a-b."""
        words = []
        for text in argv:
            flag, equals, value = text.partition("=")
            if flag.startswith("--"):
                words.append(flag.replace("_", "-") + equals + value)
            elif text.startswith("-") and text != "-h" and words and "=" not in words[-1]:
                words[-1] += f"={text}"  # argparse would take the value of `--best -loss` for a flag
            else:
                words.append(text)
        values, unknown = self.parse_known_args(words)
        if not unknown:
            return vars(values)
        flag = unknown[0].partition("=")[0]
        if flag in FLAGS:
            owners = " and ".join(f"train_{script}.py" for script in FLAGS[flag].metadata["scripts"])
            raise UserError(f"{flag} cannot take effect in {self.prog}\nit belongs to {owners}")
        self.error(f"unknown argument {unknown[0]!r}{did_you_mean(flag, FLAGS)}")

    def error(self, message):
        raise UserError(f"{message.removeprefix('argument ')}\nsee {self.prog} --help")


def how_to_read(field):
    """What argparse is told of a flag."""
    text = field.metadata["text"]
    if field.type is bool:
        return {"action": "store_false" if field.default else "store_true", "help": text}
    if field.default not in (None, "", ()):
        text += f" (default: {field.default})"
    return {
        "type": functools.partial(read_value, field),
        "choices": field.metadata["choices"],
        "metavar": SHAPES.get(field.type),
        "help": text,
    }


def read_value(field, text):
    """The value that a person wrote."""
    if field.type in NUMBERS:
        low = field.metadata["low"]
        below = field.metadata["below"]
        with suppress(ValueError):
            value = field.type(text)
            if low <= value < below:
                return value
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {NUMBERS[field.type]} from {low} and below {below:g}"
        )
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    if field.name == "optimizer" and ".py" not in text:
        return text.lower()
    return tuple(text.split(",")) if field.type is tuple else field.type(text)


# ---- at the start of a process --------------------------------------------------------------------
def begin_life() -> None:
    """Call first in every process; UserError if it cannot meet others."""
    ready_streams()
    place = here()
    if not place.can_meet:
        raise UserError(
            f"ranks cannot meet with {meeting_variables()}\n"
            "start with torchrun, or set RANK (0 to WORLD_SIZE - 1), WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    if place.agent:
        die_with_the_parent()
    note_that_it_waits(True)


def parse_options(
    doc: str | None, argv: list[str] | None = None, script: str | None = None, processes: int | None = None
) -> Options:
    """The checked options of this process; a mistake ends it with exit code 2, printed once per machine.

    A launcher checks them for its workers: then `processes` is their number, or 0 if it is not known yet.
    """
    if argv is None and processes is None:
        gc.disable()  # until `join`: imports make no garbage, and the search for it is a fifth of their time
    try:
        begin_life()
        script = script or SCRIPTS.get(Path(sys.argv[0]).name, "ddp")
        given = Parser(doc, script).read(sys.argv[1:] if argv is None else argv)
        opts = Options(script=script, **_inherited(given, script))
        check_names(opts)
        check_together(opts)
        check_files(opts)
        wrong = []
        with suppress(OSError, UserError):  # of what cannot be read the store tells
            if opts.is_bound:
                wrong = opts.compare(read_options(opts.run_dir))
        opts.refuse_another_run(wrong)
        world = here().size if processes is None else processes
        if world:
            check_world(opts, world)
    except UserError as error:
        end(error, shared=True)
    if argv is None and here().rank == 0 and not here().launched:  # its launcher has printed it
        say(f"{opts.run_dir}: starting; importing torch takes some seconds")
    return opts


def _inherited(given, script):
    """With --fork: also the flags of this run's own earlier lives, or of the run that it leaves."""
    if not {"fork", "at"} & given.keys():
        return given
    if "resume" in given or not {"fork", "at", "run_dir"} <= given.keys():
        raise UserError(
            "--fork needs --at and --run-dir, and no --resume\nwrite --fork RUN --at N --run-dir NEW"
        )
    source = given["run_dir"] if (given["run_dir"] / "options.json").is_file() else given["fork"]
    taken = {flag.name for flag in FLAGS.values() if script in flag.metadata["scripts"]} - NOT_INHERITED
    flags = {}
    for name, value in read_options(source).items():
        if name in taken - given.keys():
            flags[name] = tuple(value) if isinstance(value, list) else value
    refuse_foreign_code(source, flags)
    return flags | given


def read_options(run_dir: Path | str) -> Values:
    """The options of a run's newest life, from its options.json; UserError if that is damaged."""
    path = Path(run_dir, "options.json")
    with blamed(str(run_dir), "name the folder of a run"):
        if not path.is_file():
            raise FileNotFoundError(path)
        facts = json.loads(path.read_text(encoding="utf-8"))
        seal = facts.pop("seal", "")
        text = f"{json.dumps(facts, indent=1, sort_keys=True)}\n"
        if hashlib.sha256(text.encode()).hexdigest() != seal:
            raise ValueError("options.json is damaged")
        return facts["options"]


def refuse_foreign_code(run_dir: Path | str, flags: Values) -> None:
    """UserError if these flags of a run name a file in its folder, or of another user than us and root."""
    for name, value in flags.items():
        path = Path(str(value).rpartition(":")[0]).resolve()
        inside = path.is_relative_to(Path(run_dir).resolve())
        if path.is_file() and (inside or path.stat().st_uid not in (0, os.getuid())):
            raise UserError(
                f"{run_dir} would run {value}: a file in that folder, or of another user\n"
                f"read it; if you trust it, name it yourself: {flag_of(name)} {value}"
            )


# ---- a function of a user's own, as `path/to/file.py:function` ----------------------------------------
def find_user(spec: str, *default: None) -> Any:
    """The function that `path/to/file.py:function` names; `default`, if one is given and there is none."""
    path, _, name = spec.rpartition(":")
    with blamed(spec):
        return getattr(load_file(Path(path).resolve()), name, *default)


def call_user(spec: str, *facts: object, first: bool = False) -> Any:
    """Calls the function in `path/to/file.py:function` with the last of `facts`, as many as it requires.

    Parameters with a default keep it: `f()`, `f(data)` and `f(opts, data, width=3)` can all build a model.
    With `first` it gets the first of them.
    """
    function = find_user(spec)
    with blamed(spec):
        required = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        count = min(len(required), len(facts))
        return function(*(facts[:count] if first else facts[len(facts) - count :]))


@functools.cache
def load_file(path):
    """The module in a file, loaded once in this process; it can import files of its own folder."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: it must not hide common or the standard library
    name = f"user_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    # its source: a cached .pyc may be that of a text of the same second and size
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return module
