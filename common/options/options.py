"""Flags -> one frozen dataclass; validation; the run's identity.

A flag is one field of Options: `decides` marks those that decide the result (a restart may not change them),
`free` the others. Nothing here imports torch, so `--help` and a wrong flag answer at once.
"""
import gc
import os
import re
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from common.errors import UserError, did_you_mean, fail
from common.options.environment import check_environment, end_a_crash_loop, warn_of_late_joins, world_size
from common.options.flags import BALANCE, DEVICES, NAME, PATH, SWITCH, Parser, fixed, flag_of, free, one_of, real, whole
from common.options.process import die_with_the_agent

LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3}
FILES, IMAGES = ("data_dir", "download"), ("mixup", "cutmix")
DATASET_FLAGS = {  # which of the flags that depend on the dataset can take effect with it
    "digits": IMAGES, "mnist": FILES + IMAGES, "fashion-mnist": FILES + IMAGES, "cifar10": FILES + IMAGES,
    "imagefolder": ("data_dir", "workers", *IMAGES), "sentiment": (), "sentiment-large": (), "random": ("mixup",),
    "text": ("data_dir",)}

OTHERS = {  # why these do not go with --virtual-ranks
    "--micro-batch-size": "a slice is one forward, so its size is already fixed",
    "--sync-bn": "statistics over all ranks would depend on their number",
    "--compile": "compiled code depends on the shapes a process has seen, so on the world"}


@dataclass(frozen=True)
class Options:
    """What the command line says, whole: values left open follow from the others (lr from the optimizer,
    ...).
    """

    script: str = "ddp"  # ddp, dp or mp: not a flag

    run_dir: Path = free(None, PATH, "folder and identity of the run (default: runs/MODEL-DATASET)", "the run")
    resume: str = free("auto", PATH, "auto: from the newest checkpoint that verifies; none: afresh; or a checkpoint")
    init_from: str = fixed("", PATH, "a foreign .pt file: its weights only, where there is no checkpoint yet")
    seed: int = fixed(0, whole(0, 2**63 - 1), "every random number follows from it")
    epochs: int = free(3, whole(1), "how often each sample is seen; may be raised to go further")
    max_steps: int = free(0, whole(0), "stop after so many steps in all; 0: no limit")
    eval_only: bool = free(False, SWITCH, "evaluate the checkpoint and leave")

    model: str = fixed("net", NAME, "net, mlp, lstm, gpt, gpt:tiny|small|medium|LxHxD, a torchvision name, or "
                         "path/to/file.py:function", "model, data")
    dataset: str = fixed("digits", NAME, f"{', '.join(DATASET_FLAGS)}, random:100x5, text:128, or path/to/file.py:function")
    data_dir: str = free("data", PATH, "where the dataset's files are")
    download: bool = free(False, SWITCH, "fetch missing files (one process per machine does)")
    workers: int = free(None, whole(0, 256), "loading processes per rank, if samples are files (default: up to 4)")
    accept_data_change: bool = free(False, SWITCH, "go on although the data has changed; with another number of "
                                    "samples the epoch begins again")
    augment: str = fixed("auto", one_of("auto", "none"), "random crops and flips that suit the dataset")

    global_batch_size: int = fixed(64, whole(1), "samples per step, at any number of processes", "optimization")
    virtual_ranks: int = fixed(0, whole(0, 65536), "cut each global batch into so many fixed slices: the same model to the "
                                 "last bit at any number of processes up to that; 0: off", scripts="ddp mp",
                                 why="nn.DataParallel cuts by the number of devices, and adds up in their order")
    micro_batch_size: int = fixed(0, whole(0), "at most so many samples per forward; 0: a rank's whole share")
    optimizer: str = fixed("adam", one_of(*LR), "update rule")
    lr: float = fixed(None, real(above=True), "learning rate (default: 0.05 for sgd, 0.001 for adam and adamw)")
    momentum: float = fixed(None, real(below=1), "for sgd (default: 0.9)")
    weight_decay: float = fixed(0.0, real(), "pull of the weights towards zero")
    lr_schedule: str = fixed("constant", one_of("constant", "step", "cosine"), "how lr falls until the last epoch")
    warmup_epochs: float = fixed(0.0, real(), "lr rises linearly for so long")
    label_smoothing: float = fixed(0.0, real(below=1), "share of the target spread over all classes")
    mixup: float = fixed(0.0, real(), "mix pairs of samples: Beta(X, X); 0: off")
    cutmix: float = fixed(0.0, real(), "paste a box of another sample: Beta(X, X); 0: off")
    clip_grad_norm: float = fixed(0.0, real(), "longest gradient; 0: off")
    ema_decay: float = fixed(0.0, real(below=1), "averaged weights, as 0.999; 0: off")

    device: str = free("auto", one_of("auto", "cpu", "cuda"), "auto: the GPU where there is one", "devices and speed")
    devices: tuple = free((), DEVICES, "the devices this process drives (default: all GPUs)", scripts="dp mp")
    stages: int = free(0, whole(0, 65536), "cut the net over so many processes each; 0: over all of them, or over --devices",
                       scripts="mp")
    schedule: str = free("1f1b", one_of("gpipe", "1f1b", "interleaved"), "order of the micro batches in the stages", scripts="mp")
    balance: str = free("parameters", BALANCE, "where to cut: parameters, time (measured), or pieces a stage, as 3,1", scripts="mp")
    shard: bool = free(False, SWITCH, "spread each stage's weights over its replicas (FSDP)", scripts="mp")
    recompute: bool = free(False, SWITCH, "keep no activations inside the stages, compute them again", scripts="mp")
    amp: str = fixed("off", one_of("off", "bf16", "fp16"), "mixed precision")
    compile: bool = fixed(False, SWITCH, "torch.compile")
    channels_last: bool = fixed(False, SWITCH, "memory layout for convolutions")
    sync_bn: bool = fixed(False, SWITCH, "batch norm statistics over all ranks (GPUs only)", scripts="ddp")
    threads: int = free(0, whole(0, 4096), "CPU threads per process; 0: leave it to torch")

    save_every: int = free(500, whole(0), "steps between checkpoints; 0: off", "saving and watching")
    save_seconds: int = free(300, whole(0), "seconds between checkpoints; 0: off")
    keep: int = free(3, whole(2), "checkpoints to keep")
    eval_every: int = free(1, whole(0), "epochs between evaluations; 0: only at the end")
    log_every: int = free(10, whole(1), "steps between log lines")
    progress: str = free("auto", one_of("auto", "on", "off"), "a bar instead of lines; auto: on a terminal")
    tensorboard: bool = free(True, SWITCH, "no curves for TensorBoard in RUN/tb")
    hang_timeout: int = free(0, whole(0), "seconds without progress that count as a hang; 0: automatic", scripts="ddp mp")
    check_every: int = free(500, whole(0), "steps between comparisons of the replicas; 0: never", scripts="ddp mp")
    audit: bool = free(False, SWITCH, "note the samples each rank trained on, for python -m common.ledger RUN --audit")
    profile: bool = free(False, SWITCH, "a trace of a few steps in RUN")
    debug: bool = free(False, SWITCH, "tracebacks and torch's own debug checks")
    show_scatter: bool = free(False, SWITCH, "print batch sizes inside and outside the model", scripts="dp")

    def __post_init__(self):
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        name = re.sub(r"[^\w.-]+", "-", f"{Path(self.model).name}-{Path(self.dataset).name}")
        left_open = {"run_dir": Path("runs", name), "lr": LR[self.optimizer],
                     "momentum": 0.9 if self.optimizer == "sgd" else None,
                     "workers": min(4, max(1, cores)) if "workers" in uses(self.dataset) else 0}
        for name, value in left_open.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def identity(self):
        """What decides the result, as JSON gives it back; the same on every restart of a run."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("decides")}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def compare(self, old):
        """[(field, old, new)] where these options contradict the identity `old`; what it lacks had its
        default then.
        """
        missing = {f.name: f.default for f in fields(self) if f.metadata.get("decides") and f.name not in old}
        was = replace(self, **missing).identity() | old
        return [(name, was[name], new) for name, new in self.identity().items() if was[name] != new]

    def to_json(self):
        """Every field, as json.dumps can write it."""
        return asdict(self) | {"run_dir": str(self.run_dir), "devices": list(self.devices)}


def uses(dataset):
    """The flags of DATASET_FLAGS that can take effect with this dataset; a user's own function may use them
    all.
    """
    if ".py" in dataset:
        return ("data_dir", "workers", *IMAGES)
    name, _, size = dataset.partition(":")
    return DATASET_FLAGS.get(name if name in ("random", "text") else dataset, ())


def parse_options(doc, argv=None, script=None, processes=None):
    """The checked options of this process; a mistake ends it with exit code 2, printed once per machine.

    An agent checks for its workers: then `processes` is how many will train, or 0 where it cannot know that
    yet.
    """
    die_with_the_agent()
    if argv is None and processes is None:
        gc.disable()  # until `join`: imports make no garbage, and the search for it is a fifth of their time
    try:
        check_environment(os.environ)
        end_a_crash_loop()
    except UserError as error:  # by hand, each process has a terminal of its own
        fail(error, error.code, everyone="TORCHELASTIC_RUN_ID" not in os.environ)
    named = re.fullmatch(r"train_(ddp|dp|mp)(\.py)?", os.path.basename(sys.argv[0]))
    script = script or (named[1] if named else "ddp")
    try:
        given = Parser(doc, script, fields(Options)[1:]).read(sys.argv[1:] if argv is None else argv)
        if "run_dir" in given:
            given["run_dir"] = Path(given["run_dir"])
        opts = Options(script=script, **given)
        _check_together(opts)
        if world := world_size() if processes is None else processes:
            _check_world(opts, world)
        _check_places(opts)
        warn_of_late_joins()
        return opts
    except UserError as error:
        fail(error)


def _check_together(opts):
    """Flags that contradict each other or cannot take effect together: an error, never silence."""
    name, known = opts.dataset, uses(opts.dataset)
    idle = [f for f in FILES + IMAGES + ("workers",)
            if f not in known and getattr(opts, f) != getattr(Options(dataset=name), f)]
    other = next((flag_of(name) for name in ("micro_batch_size", "sync_bn", "compile") if getattr(opts, name)), None)
    kinds = {device.partition(":")[0] for device in opts.devices}
    checkpoint = opts.resume not in ("auto", "none")
    _refuse(
        (opts.shard and opts.virtual_ranks,
         "--shard cannot take effect with --virtual-ranks: it adds up gradients in an order that follows the number of replicas\n"
         "leave out one of them"),
        (opts.script == "mp" and opts.virtual_ranks and opts.schedule != "1f1b",
         "--schedule cannot take effect with --virtual-ranks: slices are added up in their order\nleave out one of them"),
        (name not in DATASET_FLAGS and not known,
         f"--dataset: {name!r} is no dataset{did_you_mean(name, DATASET_FLAGS)}\n"
         f"there are {', '.join(DATASET_FLAGS)}, and path/to/file.py:function"),
        (idle, f"{', '.join(map(flag_of, idle))} cannot take effect with --dataset {name}\nleave it out"),
        (opts.momentum is not None and opts.optimizer != "sgd",
         f"--momentum cannot take effect with --optimizer {opts.optimizer}\nleave it out, or use --optimizer sgd"),
        (opts.init_from and checkpoint,
         "--init-from and --resume PATH both say where the weights come from\nleave out one of them"),
        (opts.eval_only and opts.resume == "none" and not opts.init_from,
         "--eval-only with --resume none: there is nothing to evaluate\nleave out --resume none, or give --init-from"),
        (opts.virtual_ranks > opts.global_batch_size,
         f"--virtual-ranks {opts.virtual_ranks} cuts --global-batch-size {opts.global_batch_size} into slices without samples\n"
         f"use --virtual-ranks {opts.global_batch_size} at most"),
        (opts.virtual_ranks and other,
         f"{other} cannot take effect with --virtual-ranks: {OTHERS.get(other)}\nleave out one of them"),
        (opts.sync_bn and opts.device == "cpu",
         "--sync-bn works on GPUs only, but --device is cpu\nleave out one of them"),
        (opts.amp == "fp16" and opts.device == "cpu",
         "--amp fp16 works on GPUs only, but --device is cpu\nuse --amp bf16, or leave out --device cpu"),
        (opts.device in ("cpu", "cuda") and kinds - {opts.device},
         f"--devices {','.join(opts.devices)} contradicts --device {opts.device}\nleave out one of them"),
        (opts.script == "dp" and len(kinds) > 1,
         f"--devices {','.join(opts.devices)}: train_dp.py splits a batch over devices of one kind\nname one kind"),
        (opts.script == "mp" and len(opts.devices) == 1,
         f"--devices {','.join(opts.devices)}: a model is split over two devices or more\n"
         "for example --devices cpu,cpu"))


def _check_world(opts, world):
    """Flags that need another number of processes."""
    replicas = max(1, world // (opts.stages or world)) if opts.script == "mp" else world
    _refuse(
        (opts.script == "dp" and world > 1,
         f"train_dp.py is one process for many devices, but WORLD_SIZE={world}\n"
         "use train_ddp.py with torchrun, or start train_dp.py with python"),
        (opts.stages and world % opts.stages,
         f"--stages {opts.stages}: a world of {world} {'process' if world == 1 else 'processes'} is no multiple of it\n"
         f"start a multiple (torchrun --nproc_per_node={opts.stages}), or leave --stages out to use all there are"),
        (opts.script == "mp" and opts.devices and (world > 1 or opts.stages),
         "--devices are those of a single process, here each of several has one of its own\nleave it out, or start with python"),
        (opts.shard and world // (opts.stages or world) < 2,
         f"--shard spreads a stage over its replicas, but {world} processes in {opts.stages or world} stages have one of each\n"
         f"start more processes, or use fewer stages (--stages 1)"),
        (opts.virtual_ranks and replicas > opts.virtual_ranks,
         f"WORLD_SIZE={world}{f' with --stages {opts.stages}' if opts.stages else ''}, but --virtual-ranks {opts.virtual_ranks} "
         f"cuts a global batch into so many slices only\nstart at most {opts.virtual_ranks * (world // replicas)} processes"))


def _refuse(*rules):
    """Raises for the first of these (whether it is broken, what to say)."""
    for broken, message in rules:
        if broken:
            raise UserError(message)


def _check_places(opts):
    """What the flags name on this machine's disks; needs no torch, so a typo does not cost a rendezvous."""
    run = opts.run_dir
    try:
        if opts.resume not in ("auto", "none") and not os.path.isdir(opts.resume):
            raise UserError(f"--resume: {opts.resume!r} is no folder\ngive a checkpoint's folder, or auto, or none")
        if opts.init_from and not os.path.isfile(opts.init_from):
            raise UserError(f"--init-from: {opts.init_from!r} is no file\ngive a file of weights that torch.save wrote")
        whole_path = run.resolve()
        if whole_path == Path(whole_path.anchor):
            raise UserError(f"--run-dir: {str(run)!r} is the root of the file system\ngive the run a folder of its own")
        if whole_path == Path(opts.data_dir).resolve():
            raise UserError(f"--run-dir: {str(run)!r} is the data folder too\ngive the run a folder of its own")
        for folder in (Path(opts.data_dir, "train"), Path(opts.data_dir, "val")):
            if opts.dataset == "imagefolder" and not folder.is_dir():
                raise UserError(f"dataset imagefolder: {folder} is not there\nit wants --data-dir with train/CLASS/IMAGE and "
                                "val/CLASS/IMAGE")
        there = next(place for place in (run, *run.parents) if os.path.lexists(place))
        if not there.is_dir():
            raise UserError(f"--run-dir: {str(there)!r} is not a folder\ngive the run a folder of its own")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"--run-dir: {str(there)!r} is not writable\n"
                            "choose another place, or change its permissions")
        os.stat(run)
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError) as error:  # too long a name, a circle of links, no permission
        raise UserError(f"--run-dir: {str(run)!r} cannot be used ({getattr(error, 'strerror', None) or error})\n"
                        "choose another place") from None
