"""Flags as one frozen dataclass, and the run's identity.

A flag is one field of Options: a restart may not change a `fixed` one, because it changes the result; it may
change a `free` one. Nothing here imports torch, so `--help` and a wrong flag answer at once.
"""
import gc
import os
import re
import signal
import sys
from argparse import ArgumentTypeError
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from common.errors import UserError, fail, say
from common.options.environment import begin_life, warn_of_late_joins
from common.options.flags import (
    ARGUMENTS,
    BETAS,
    CUTS,
    DEVICES,
    NAME,
    NAMES,
    OPTIMIZER,
    PATH,
    SWITCH,
    Parser,
    fixed,
    free,
    one_of,
    real,
    whole,
)
from common.options.fork import inherited
from common.options.optimizers import call_of, default_lr, keywords
from common.options.rules import DATASET_FLAGS, check_places, check_together, check_world, uses

SAID = "TRAINING_FIRST_LINE"  # environment variable: set once that line is printed


@dataclass(frozen=True)
class Options:
    """All flags with their values; those left open follow from the others (lr from the optimizer, ...)."""

    script: str = "ddp"  # ddp, dp or mp: not a flag

    run_dir: Path = free(None, PATH, "folder, identity of the run (default: runs/MODEL-DATASET)", "the run")
    resume: str = free("auto", PATH, "auto: the newest checkpoint that verifies; none: afresh; or a folder")
    fork: str = fixed("", PATH, "a run whose first --at steps this one shares, and its flags unless given")
    at: int = fixed(0, whole(1), "the step at which this run leaves --fork")
    skip: str = fixed("", NAME, "A:B: leave out the samples of steps A to B, after --at, for good")
    init_from: str = fixed("", PATH, "weights to begin with: a .pt or .safetensors file, or `pretrained`: "
                           "torchvision's, if they are on this machine")
    init_skip: tuple = fixed((), NAMES, "weights whose names begin with these start afresh, as fc.")
    freeze: tuple = fixed((), NAMES, "weights whose names begin with these do not train: conv1.,layer1.")
    seed: int = fixed(0, whole(0, 2**63 - 1), "every random number follows from it")
    epochs: int = free(3, whole(1), "how often each sample is seen; may be raised to go further")
    max_steps: int = free(0, whole(0), "stop after so many steps in all; 0: no limit")
    patience: int = free(0, whole(0), "stop after so many evaluations without a better one; 0: never")
    eval_only: bool = free(False, SWITCH, "evaluate the checkpoint and leave")

    model: str = fixed("net", NAME, "net, mlp, lstm, gpt, gpt:tiny|small|medium|LxHxD, a torchvision name, "
                       "or path/to/file.py:function", "model, data")
    dataset: str = fixed("digits", NAME, f"{', '.join(DATASET_FLAGS)}, random:100x5, text:128, tokens:128, "
                         "or path/to/file.py:function")
    task: str = fixed("classify", NAME, "what is minimised and shown: classify, tokens, or "
                      "path/to/file.py:function")
    data_dir: str = free("data", PATH, "where the dataset's files are")
    train_folder: str = free("train", NAME, "folder of images, or shards, of DATA_DIR to train on")
    val_folder: str = free("val", NAME, "the same, to evaluate on")
    image_size: int = fixed(224, whole(8, 8192), "images become squares of so many pixels a side")
    vocab_size: int = free(0, whole(0, 2**32), "different tokens of train.bin; 0: as its meta.json says")
    download: bool = free(False, SWITCH, "fetch missing files (one process per machine does)")
    workers: int = free(None, whole(0, 256), "loading processes per rank for files (default: up to 4)")
    bad_samples: str = fixed("stop", one_of("stop", "skip"), "an unreadable sample ends the run, or counts 0",
                             scripts="ddp dp")
    accept_data_change: bool = free(False, SWITCH, "resume although the data has changed; with another "
                                    "number of samples the epoch begins again")
    augment: str = fixed("auto", one_of("auto", "none"), "random crops and flips that suit the dataset")

    global_batch_size: int = fixed(64, whole(1), "samples per step, over all processes", "optimization")
    virtual_ranks: int = fixed(0, whole(0, 65536), "cut each global batch into so many fixed slices: the "
                               "same model to the last bit at any number of processes up to that; 0: off",
                               scripts="ddp mp")
    micro_batch_size: int = fixed(0, whole(0), "at most so many samples per forward; 0: a rank's whole share")
    optimizer: str = fixed("adam", OPTIMIZER, "a name of torch.optim, or path/to/file.py:function of (net, "
                           "opts) that returns an optimizer; a group's `scale` multiplies its rate")
    optimizer_args: str = fixed("", ARGUMENTS, "more of its arguments, as eps=1e-6,amsgrad=True")
    lr: float = fixed(None, real(above=True), "learning rate (default: that of torch.optim; 0.05 for sgd, "
                      "0.001 for a function)")
    momentum: float = fixed(None, real(below=1), "(default for sgd: 0.9)")
    nesterov: bool = fixed(False, SWITCH, "Nesterov's momentum")
    betas: tuple = fixed(None, BETAS, "decay of the averages of adam and its relatives")
    weight_decay: float = fixed(0.0, real(), "pull of the weights towards zero")
    no_decay_1d: bool = fixed(False, SWITCH, "no pull on weights of one dimension: biases and norms")
    lr_schedule: str = fixed("constant", one_of("constant", "step", "cosine", or_function=True),
                             "how lr falls; a function of (step, steps in all, opts) returns a factor")
    min_lr: float = fixed(0.0, real(), "lr falls no lower than this")
    warmup_epochs: float = fixed(0.0, real(), "epochs in which lr first rises linearly")
    label_smoothing: float = fixed(0.0, real(below=1), "share of the target spread over all classes")
    mixup: float = fixed(0.0, real(), "mix pairs of samples: Beta(X, X); 0: off")
    cutmix: float = fixed(0.0, real(), "paste a box of another sample: Beta(X, X); 0: off")
    clip_grad_norm: float = fixed(0.0, real(), "longest gradient; 0: off")
    ema_decay: float = fixed(0.0, real(below=1), "averaged weights, as 0.999; 0: off")

    device: str = free("auto", one_of("auto", "cpu", "cuda"), "auto: a GPU, if any", "devices and speed")
    devices: tuple = free((), DEVICES, "the devices this process drives (default: all GPUs)", scripts="dp mp")
    stages: int = free(0, whole(0, 65536), "cut the net over so many processes each; 0: all, or --devices",
                       scripts="mp")
    schedule: str = free("1f1b", one_of("gpipe", "1f1b", "interleaved"), "order of the micro batches",
                         scripts="mp")
    balance: str = free("parameters", CUTS, "where to cut: parameters, time (measured), or a list as 3,1",
                        scripts="mp")
    shard: bool = free(False, SWITCH, "spread each stage's weights over its replicas (FSDP)", scripts="mp")
    recompute: bool = free(False, SWITCH, "compute activations again instead of keeping them", scripts="mp")
    amp: str = fixed("off", one_of("off", "bf16", "fp16"), "mixed precision")
    compile: bool = fixed(False, SWITCH, "torch.compile")
    tf32: bool = fixed(False, SWITCH, "matrix products in TF32: faster, less exact (GPUs only)")
    channels_last: bool = fixed(False, SWITCH, "memory layout for convolutions")
    sync_bn: bool = fixed(False, SWITCH, "batch norm statistics over all ranks (GPUs only)", scripts="ddp")
    threads: int = free(0, whole(0, 4096), "CPU threads per process; 0: leave it to torch")

    save_every: int = free(500, whole(0), "steps between checkpoints; 0: off", "saving and watching")
    save_seconds: int = free(300, whole(0), "seconds between checkpoints; 0: off")
    keep: int = free(3, whole(2), "checkpoints to keep")
    keep_every: int = free(0, whole(0), "steps between checkpoints that are kept for good; 0: off")
    digest_every: int = free(0, whole(0), "steps between fingerprints of the state in the ledger; 0: off",
                             scripts="ddp dp")
    memory_tier: str = free("auto", PATH, "where survivors leave their state for the next life: auto: in "
                            "/dev/shm if it has room; off: on the disk; or a folder in memory",
                            scripts="ddp mp")
    eval_every: int = free(1, whole(0), "epochs between evaluations; 0: only at the end")
    best: str = free("", NAME, "which evaluation is kept: acc, -loss, ...; - if a lower one is better "
                     "(default: acc, or the lowest loss)")
    log_every: int = free(10, whole(1), "steps between log lines")
    progress: str = free("auto", one_of("auto", "on", "off"), "a bar instead of lines; auto: on a terminal")
    log_to: str = free("", NAME, "path/to/file.py:function, called with each row of metrics.jsonl, once")
    tensorboard: bool = free(True, SWITCH, "no curves for TensorBoard in RUN/tb")
    hang_timeout: int = free(0, whole(0), "seconds without progress; 0: automatic", scripts="ddp mp")
    check_every: int = free(500, whole(0), "steps between checks of replicas; 0: never", scripts="ddp mp")
    cross_check: int = free(0, whole(0), "steps between slices that a second rank computes too; 0: never",
                            scripts="ddp")
    audit: bool = free(False, SWITCH, "note each rank's samples, for python -m common.ledger RUN --audit")
    profile: bool = free(False, SWITCH, "a trace of a few steps in RUN")
    debug: bool = free(False, SWITCH, "tracebacks and torch's own debug checks")
    show_scatter: bool = free(False, SWITCH, "print batch sizes inside and outside the model", scripts="dp")

    def __post_init__(self):
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        name = re.sub(r"[^\w.-]+", "-", f"{Path(self.model).name}-{Path(self.dataset).name}")
        sgd = self.optimizer == "sgd" and "momentum" not in keywords(self.optimizer_args)
        left_open = {"run_dir": Path("runs", name), "lr": default_lr(self.optimizer),
                     "momentum": 0.9 if sgd else None,
                     "workers": min(4, max(1, cores)) if "workers" in uses(self.dataset) else 0}
        for name, value in left_open.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @classmethod
    def checked(cls, given: dict[str, Any], **own: Any) -> "Options":
        """The options of a script of one's own: those `given` are read as their flags would be."""
        kinds, found = {f.name: f.metadata["kind"] for f in fields(cls)[1:]}, {}
        for name, value in given.items():
            if kinds[name] is SWITCH and not isinstance(value, bool):
                raise UserError(f"{name}: {value!r} is neither True nor False")
            try:
                found[name] = value if kinds[name] is SWITCH else kinds[name](str(value))
            except ArgumentTypeError as error:
                raise UserError(f"{name}: {error}") from error
        opts = cls(**own, **found)
        check_places(opts)
        return opts

    @property
    def torch_optimizer(self) -> tuple[str, dict[str, Any]]:
        """(class of torch.optim, its arguments); ("", {}) for a user's function."""
        return call_of(self) if ".py" not in self.optimizer else ("", {})

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
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until it means "save"; before that it would kill
        gc.disable()  # until `join`: imports make no garbage, and the search for it is a fifth of their time
    try:
        begin_life()
    except UserError as error:  # by hand, each process has a terminal of its own
        fail(error, everyone="TORCHELASTIC_RUN_ID" not in os.environ)
    named = re.fullmatch(r"train_(ddp|dp|mp)(\.py)?", os.path.basename(sys.argv[0]))
    script = script or (named[1] if named else "ddp")
    try:
        given = Parser(doc, script, fields(Options)[1:]).read(sys.argv[1:] if argv is None else argv)
        given = inherited(given, {f.name for f in fields(Options)[1:] if script in f.metadata["scripts"]})
        if "run_dir" in given:
            given["run_dir"] = Path(given["run_dir"])
        opts = Options(script=script, **given)
        check_together(opts)
        if world := int(os.environ.get("WORLD_SIZE", 1)) if processes is None else processes:
            check_world(opts, world)
        check_places(opts)
        warn_of_late_joins()
        if argv is None:
            _say_at_once(opts)
        return opts
    except UserError as error:
        fail(error)


def _say_at_once(opts):
    """The first line, before the seconds in which torch is imported; a launcher prints it for its workers."""
    if os.environ.get("RANK", "0") == "0" and not os.environ.get(SAID):
        os.environ[SAID] = "1"
        say(f"{opts.run_dir}: starting; importing torch takes some seconds")
