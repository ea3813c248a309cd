"""Flags as one frozen dataclass, and the run's identity.

A flag is one field of Options: a restart may not change a `fixed` one, because it changes the result; it may
change a `free` one. Nothing here imports torch, so `--help` and a wrong flag answer at once.
"""
import gc
import inspect
import os
import re
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean, end, say
from common.options.environment import begin_life, warn_of_late_joins
from common.options.flags import Parser, fixed, flag_of, free, value_of
from common.options.fork import inherited
from common.options.optimizers import OURS, RATE, RATES, keywords
from common.options.rules import DATASETS, check_files, check_together, check_world, uses
from common.place import here

SAID = "TRAINING_FIRST_LINE"  # environment variable: set once that line is printed


@dataclass(frozen=True)
class Options:
    """All flags with their values; those left open follow from the others (lr from the optimizer, ...)."""

    script: str = "ddp"  # ddp, dp or mp: not a flag

    run_dir: Path = free(None, "folder, identity of the run (default: runs/MODEL-DATASET)", "the run")
    resume: str = free("auto", "auto: the newest checkpoint that verifies; or a folder")
    fork: str = fixed("", "a run whose first --at steps this one shares, and its flags unless given")
    at: int = fixed(0, "the step at which this run leaves --fork")
    init_from: str = fixed("", "weights to begin with: a .pt or .safetensors file, or `pretrained`: "
                           "torchvision's, if they are on this machine")
    init_skip: tuple = fixed((), "weights whose names begin with these start afresh, as fc.")
    freeze: tuple = fixed((), "weights whose names begin with these do not train: conv1.,layer1.")
    seed: int = fixed(0, "every random number follows from it")
    epochs: int = free(3, "how often each sample is seen; may be raised to go further", low=1)
    max_steps: int = free(0, "stop after so many steps in all; 0: no limit")
    patience: int = free(0, "stop after so many evaluations without a better one; 0: never")
    eval_only: bool = free(False, "evaluate the checkpoint and leave")

    model: str = fixed("net", "net, mlp, lstm, gpt, gpt:tiny|small|medium|LxHxD, a torchvision name, "
                       "or path/to/file.py:function", "model, data")
    dataset: str = fixed("digits", f"{', '.join(DATASETS)}, random:100x5, text:128, tokens:128, "
                         "or path/to/file.py:function")
    task: str = fixed(None, "what is minimised and shown: classify, tokens, or path/to/file.py:function "
                      "(default: tokens for gpt, text and tokens, else classify)")
    data_dir: str = free("data", "where the dataset's files are: of imagefolder train/ and val/")
    image_size: int = fixed(224, "images become squares of so many pixels a side", low=8)
    vocab_size: int = free(0, "different tokens of train.bin; 0: as its meta.json says")
    download: bool = free(False, "fetch missing files (one process per machine does)")
    workers: int = free(None, "loading processes per rank for files (default: up to 4)")
    bad_samples: str = fixed("stop", "an unreadable sample ends the run, or counts 0", scripts="ddp dp",
                             choices=("stop", "skip"))
    accept_data_change: bool = free(False, "resume although the data has changed; with another number of "
                                    "samples the epoch begins again")
    augment: str = fixed("auto", "random crops and flips that suit the dataset", choices=("auto", "none"))

    global_batch_size: int = fixed(64, "samples per step, over all processes", "optimization", low=1)
    virtual_ranks: int = fixed(0, "cut each global batch into so many fixed slices: the same model to the "
                               "last bit at any number of processes up to that; 0: off", scripts="ddp mp")
    micro_batch_size: int = fixed(0, "at most so many samples per forward; 0: a rank's whole share")
    optimizer: str = fixed("adam", "a name of torch.optim, or path/to/file.py:function of (net, opts) that "
                           "returns an optimizer; a group's `scale` multiplies its rate")
    optimizer_args: str = fixed("", "more of its arguments, as betas=(0.9,0.95),amsgrad=True")
    lr: float = fixed(None, "learning rate (default: torch.optim's; 0.05 for sgd, 0.001 for a function)")
    momentum: float = fixed(None, "(default for sgd: 0.9)", below=1)
    betas: str = fixed("", "decay of the averages of adam and its relatives, as 0.9,0.95")
    weight_decay: float = fixed(0.0, "pull of the weights towards zero")
    no_decay_1d: bool = fixed(False, "no pull on weights of one dimension: biases and norms")
    lr_schedule: str = fixed("constant", "how lr falls; a function of (step, steps in all, opts) returns a "
                             "factor", choices=("constant", "step", "cosine", "FILE.py:f"))
    min_lr: float = fixed(0.0, "lr falls no lower than this")
    warmup_epochs: float = fixed(0.0, "epochs in which lr first rises linearly")
    label_smoothing: float = fixed(0.0, "share of the target spread over all classes", below=1)
    clip_grad_norm: float = fixed(0.0, "longest gradient; 0: off")
    ema_decay: float = fixed(0.0, "averaged weights, as 0.999; 0: off", below=1)

    device: str = free("auto", "auto: a GPU, if any", "devices and speed", choices=("auto", "cpu", "cuda"))
    devices: tuple = free((), "the devices this process drives (default: all GPUs)", scripts="dp mp")
    stages: int = free(0, "cut the net over so many processes each; 0: all, or --devices", scripts="mp")
    balance: str = free("parameters", "where to cut: by parameters, or counts of pieces as 3,1", scripts="mp")
    shard: bool = free(False, "spread each stage's weights over its replicas (FSDP)", scripts="mp")
    recompute: bool = free(False, "compute activations again instead of keeping them", scripts="mp")
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
    digest_every: int = free(0, "steps between fingerprints of the state in the ledger; 0: off",
                             scripts="ddp dp")
    eval_every: int = free(1, "epochs between evaluations; 0: only at the end")
    best: str = free("", "which evaluation is kept: acc, -loss, ...; - if a lower one is better "
                     "(default: acc, or the lowest loss)")
    log_every: int = free(10, "steps between log lines", low=1)
    progress: str = free("auto", "a bar instead of lines; auto: on a terminal", choices=("auto", "on", "off"))
    tensorboard: bool = free(True, "no curves for TensorBoard in RUN/tb")
    hang_timeout: int = free(0, "seconds without progress; 0: automatic", scripts="ddp mp")
    check_every: int = free(500, "steps between checks of replicas; 0: never", scripts="ddp mp")
    cross_check: int = free(0, "steps between slices that a second rank computes too; 0: never",
                            scripts="ddp")
    audit: bool = free(False, "note each rank's samples, for python -m common.ledger RUN --audit")
    debug: bool = free(False, "tracebacks and torch's own debug checks")
    show_scatter: bool = free(False, "print batch sizes inside and outside the model", scripts="dp")

    def __post_init__(self):
        for name, value in self._left_open().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _left_open(self):
        """Defaults that follow from other flags."""
        folder = f"{Path(self.model).name}-{Path(self.dataset).name}"
        words = self.model.partition(":")[0] == "gpt" or self.dataset.partition(":")[0] in ("text", "tokens")
        cores = (os.cpu_count() or 1) // here().local_size
        loads = "workers" in uses(self.dataset)
        sgd = self.optimizer == "sgd" and "momentum" not in keywords(self.optimizer_args)
        return {
            "run_dir": Path("runs", re.sub(r"[^\w.-]+", "-", folder)),
            "task": "tokens" if words else "classify",
            "lr": RATES.get(self.optimizer, RATE),
            "momentum": 0.9 if sgd else None,
            "workers": min(4, max(1, cores)) if loads else 0}

    @classmethod
    def checked(cls, given: dict[str, Any], **own: Any) -> "Options":
        """The options of a script of one's own: those `given` are read as their flags would be."""
        values = dict(own)
        for field in fields(cls)[1:]:
            value = given.get(field.name)
            if value is None:
                continue
            if field.type is bool and not isinstance(value, bool):
                raise UserError(f"{field.name}: {value!r} is neither True nor False")
            try:
                values[field.name] = value if field.type is bool else value_of(field, str(value))
            except ValueError as error:
                raise UserError(f"{field.name}: {error}") from error
        opts = cls(**values)
        check_files(opts)
        return opts

    @property
    def torch_optimizer(self) -> tuple[str, dict[str, Any]]:
        """(class of torch.optim, its arguments); ("", {}) for a user's function."""
        if ".py" in self.optimizer:
            return "", {}
        from torch import optim  # not at the top: flags are read without torch
        kinds = {name.lower(): name for name, kind in vars(optim).items() if isinstance(kind, type)}
        if self.optimizer not in kinds:
            raise UserError(f"--optimizer: {self.optimizer!r} is not in torch.optim"
                            f"{did_you_mean(self.optimizer, kinds)}\n"
                            "or write a function: path/to/file.py:function")
        name = kinds[self.optimizer]
        arguments: dict[str, Any] = {"lr": self.lr}
        if self.weight_decay or "weight_decay" in inspect.signature(getattr(optim, name)).parameters:
            arguments["weight_decay"] = self.weight_decay
        if self.momentum is not None:
            arguments["momentum"] = self.momentum
        if self.betas:
            arguments |= keywords(f"betas=({self.betas})")
        more = keywords(self.optimizer_args)
        for flag in arguments:
            if flag in more:
                raise UserError(f"--optimizer-args: {flag} has a flag of its own\nuse {flag_of(flag)}")
        if self.optimizer in OURS and "foreach" not in more:
            arguments["fused"] = True
        return name, arguments | more

    def identity(self) -> dict[str, Any]:
        """All fixed flags, as JSON gives them back; the same on every restart of a run."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("fixed")}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def compare(self, old: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """[(field, old, new)] where these options contradict `old`; a field missing there had its default.

        Of a file only the name counts, not its folder.
        """
        def plain(value):
            return value.rpartition("/")[2] if isinstance(value, str) else value

        lacking = [f for f in fields(self) if f.metadata.get("fixed") and f.name not in old]
        defaults: dict[str, Any] = {f.name: f.default for f in lacking}
        was = replace(self, **defaults).identity() | old
        return [(name, was[name], new) for name, new in self.identity().items()
                if plain(was[name]) != plain(new)]

    def to_json(self) -> dict[str, Any]:
        """Every field, as json.dumps can write it."""
        return asdict(self) | {"run_dir": str(self.run_dir), "devices": list(self.devices)}

    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as json.dumps can write them."""
        plain = type(self)(script=self.script).to_json()
        return {name: value for name, value in self.to_json().items() if value != plain[name]}


def parse_options(doc: str | None, argv: list[str] | None = None, script: str | None = None,
                  processes: int | None = None) -> Options:
    """The checked options of this process; a mistake ends it with exit code 2, printed once per machine.

    A launcher checks them for its workers: then `processes` is their number, or 0 if it is not known yet.
    """
    if argv is None and processes is None:
        gc.disable()  # until `join`: imports make no garbage, and the search for it is a fifth of their time
    try:
        begin_life()
        opts = _parsed(doc, argv, script)
        world = here().size if processes is None else processes
        if world:
            check_world(opts, world)
        warn_of_late_joins()
    except UserError as error:
        end(error, shared=True)
    if argv is None:
        _say_at_once(opts)
    return opts


def _parsed(doc, argv, script):
    named = re.fullmatch(r"train_(ddp|dp|mp)(\.py)?", os.path.basename(sys.argv[0]))
    if not script:
        script = named[1] if named else "ddp"
    flags = fields(Options)[1:]
    given = Parser(doc, script, flags).read(sys.argv[1:] if argv is None else argv)
    given = inherited(given, {flag.name for flag in flags if script in flag.metadata["scripts"]})
    if "run_dir" in given:
        given["run_dir"] = Path(given["run_dir"])
    opts = Options(script=script, **given)
    check_together(opts)
    check_files(opts)
    return opts


def _say_at_once(opts):
    """The first line, before the seconds in which torch is imported; a launcher prints it for its workers."""
    if here().rank == 0 and not os.environ.get(SAID):
        os.environ[SAID] = "1"
        say(f"{opts.run_dir}: starting; importing torch takes some seconds")
