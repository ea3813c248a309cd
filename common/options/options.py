"""What was asked for, as one frozen dataclass, and what of it makes a run that run and no other.

A flag is one field of Options: a restart may not change a `fixed` one, because it changes the result; it may
change a `free` one. The store writes the fields into options.json; the next start compares itself with them.
"""

import dataclasses
import inspect
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, blamed
from common.options.registry import DATASETS, FOLDERS, FUSED, RATE, RATES, extra, flag_of, kind_of
from common.place import here
from common.sealed import Facts, unsealed

Values = dict[str, Any]  # of fields, by name
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


def as_imagefolder(size: int) -> str:
    """Say what --dataset imagefolder does to a picture outside of training."""
    return (
        f"Resize({size * 256 // 224}), CenterCrop({size}), 0 to 1, "
        "less mean 0.485 0.456 0.406, by deviation 0.229 0.224 0.225"
    )


def free(
    default, text, group="", scripts="ddp dp mp", low=0, below=math.inf, choices=None, changes_result=False
):
    """Make a field of Options: a flag that may change between restarts; `group` opens a group of --help."""
    metadata = {
        "text": text,
        "group": group,
        "scripts": scripts.split(),
        "low": low,
        "below": below,
        "choices": choices,
        "fixed": changes_result,
    }
    return dataclasses.field(default=default, metadata=metadata)


def fixed(*args, **kwargs):
    """Make a field as `free` does, of a flag that changes the result: a restart may not change it."""
    return free(*args, **kwargs, changes_result=True)


@dataclass(frozen=True)
class Options:
    """All flags with their values; those left open follow from the others (lr from the optimizer, ...)."""

    script: str = "ddp"  # ddp, dp or mp: not a flag

    run_dir: Path = free(
        None,
        "folder, identity of the run (default: runs/MODEL-DATASET, of train_dp.py with -dp, ...)",
        "the run",
    )
    resume: str = free("auto", "auto: the newest checkpoint that verifies; or a folder")
    fork: str = fixed("", "a run whose first --at steps this one shares, and its flags unless given")
    at: int = fixed(0, "the step at which this run leaves --fork")
    init_from: str = fixed("", "pretrained weights to begin with: a .pt or .safetensors file")
    init_skip: tuple = fixed((), "weights whose names begin with these start afresh, as fc.")
    freeze: tuple = fixed(
        (), "frozen weights: those whose names begin with these do not train, as conv1.,layer1."
    )
    seed: int = fixed(0, "random seed: every random number follows from it")
    epochs: int = free(3, "epochs: how often each sample is seen; may be raised to train on", low=1)
    max_steps: int = free(0, "stop after so many steps in all; 0: no limit")
    patience: int = free(0, "early stopping: after so many evaluations without a better one; 0: never")
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
    workers: int = free(None, "loading processes per rank (default: up to 4 for imagefolder, else none)")
    bad_samples: str = fixed(
        "stop", "an unreadable sample ends the run, or counts 0", scripts="ddp dp", choices=("stop", "skip")
    )
    accept_data_change: bool = free(
        False, "resume although the data has changed; with another number of samples the epoch begins again"
    )
    augment: str = fixed(
        "auto",
        "data augmentation: the random crops and flips that suit the dataset",
        choices=("auto", "none"),
    )

    global_batch_size: int = fixed(64, "samples per step, over all processes", "optimization", low=1)
    virtual_ranks: int = fixed(
        0,
        "cut each global batch into so many fixed slices: the same model to the "
        "last bit at any number of processes up to that; 0: off",
        scripts="ddp mp",
    )
    micro_batch_size: int = fixed(
        0, "micro batch: at most so many samples per forward (gradient accumulation); 0: a rank's whole share"
    )
    in_flight: int = free(
        0,
        "micro batches: forwards before their common backward; 0: one, or four a device of a net on several",
        scripts="ddp mp",
    )
    optimizer: str = fixed(
        "adam",
        "a name of torch.optim, or path/to/file.py:function of (net, opts) that "
        "returns an optimizer; a group's `scale` multiplies its rate",
    )
    optimizer_args: str = fixed("", "more of its arguments, as betas=(0.9,0.95),amsgrad=True")
    lr: float = fixed(None, "learning rate (default: torch.optim's; 0.05 for sgd, 0.001 for a function)")
    momentum: float = fixed(
        None,
        "momentum: the share of its last update that a weight repeats (default for sgd: 0.9)",
        below=1,
    )
    weight_decay: float = fixed(0.0, "weight decay: pulls weights towards zero (adamw in torch: 0.01)")
    no_decay_1d: bool = fixed(False, "no weight decay for weights of one dimension: biases and norms")
    lr_schedule: str = fixed(
        "constant",
        "learning rate schedule: constant, step, cosine, or path/to/file.py:function "
        "of (step, steps in all, opts) that returns a factor",
    )
    min_lr: float = fixed(0.0, "the lowest learning rate of a schedule")
    warmup_epochs: float = fixed(0.0, "linear warmup of the learning rate, in epochs")
    label_smoothing: float = fixed(
        0.0, "label smoothing: the share of a target that is spread over all classes", below=1
    )
    clip_grad_norm: float = fixed(0.0, "gradient clipping: the largest norm of the gradient; 0: off")
    ema_decay: float = fixed(
        0.0, "exponential moving average of the weights (EMA), as 0.999; 0: off", below=1
    )

    device: str = free("auto", "auto: a GPU, if any; cpu, cuda, or another kind of GPU", "devices and speed")
    devices: tuple = free(
        (), "the devices this process drives (default: all GPUs), as cuda:0,cuda:1", scripts="dp mp"
    )
    balance: str = free("parameters", "where to cut: by parameters, or counts of pieces as 3,1", scripts="mp")
    amp: str = fixed("off", "mixed precision", choices=("off", "bf16", "fp16"))
    compile: bool = fixed(False, "torch.compile", scripts="ddp dp")
    tf32: bool = fixed(
        False, "TF32 matrix products: faster, less exact (CUDA only; convolutions have it anyway)"
    )
    channels_last: bool = fixed(False, "channels-last memory format, for convolutions")
    sync_bn: bool = fixed(False, "SyncBatchNorm: statistics over all ranks (GPUs only)", scripts="ddp")
    threads: int = free(0, "CPU threads per process; 0: leave it to torch")

    save_every: int = free(500, "steps between checkpoints; 0: off", "saving and watching")
    save_seconds: int = free(300, "seconds between checkpoints; 0: off")
    keep: int = free(3, "checkpoints to keep", low=2)
    keep_every: int = free(0, "steps between checkpoints that are kept for good; 0: off")
    copy_to: str = free(
        "", "URL that gets each checkpoint, too, as s3://BUCKET/RUN; an empty run folder starts from there"
    )
    digest_every: int = free(
        0, "steps between fingerprints of the state in the ledger; 0: off", scripts="ddp dp"
    )
    eval_every: int = free(1, "epochs between evaluations; 0: only at the end")
    best: str = free(
        "",
        "the evaluation to keep: the one with the highest acc, with -loss the lowest loss "
        "(default: acc if the task has it, else -loss)",
    )
    log_every: int = free(10, "steps between log lines", low=1)
    progress: str = free("auto", "a bar instead of lines; auto: on a terminal", choices=("auto", "on", "off"))
    tensorboard: bool = free(True, "do not write curves for TensorBoard into RUN/tb")
    hang_timeout: int = free(0, "seconds without progress; 0: 600", scripts="ddp mp")
    check_every: int = free(500, "steps between checks of replicas; 0: never", scripts="ddp mp")
    cross_check: int = free(0, "steps between slices that all ranks compute; 0: never", scripts="ddp")
    audit: bool = free(False, "note each rank's samples, for python -m common.ledger RUN --audit")
    debug: bool = free(False, "tracebacks and torch's own debug checks")
    show_scatter: bool = free(False, "print batch sizes inside and outside the model", scripts="dp")

    def __post_init__(self):
        """Fill in defaults that follow from other flags."""
        folder = f"{Path(self.model).name}-{Path(self.dataset).name}"
        if self.script != "ddp":  # the three scripts may be tried one after the other
            folder += f"-{self.script}"
        words = kind_of(self.model) == "gpt" or kind_of(self.dataset) in ("text", "tokens")
        cores = (os.cpu_count() or 1) // here().local_size
        left_open = {
            "run_dir": Path("runs", re.sub(r"[^\w.-]+", "-", folder)),
            "task": "tokens" if words else "classify",
            "lr": RATES.get(self.optimizer, RATE),
            "momentum": 0.9 if self.optimizer == "sgd" and "momentum" not in self.optimizer_args else None,
            "workers": min(4, max(1, cores)) if self.dataset == "imagefolder" else 0,
        }
        for name, value in left_open.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def flags_of_dataset(self) -> tuple[str, ...]:
        """Return the flags of DATASETS that can take effect with this dataset."""
        if ".py:" in self.dataset:
            return FOLDERS
        _, flags = DATASETS.get(kind_of(self.dataset), ("", ()))
        return flags

    @property
    def torch_optimizer(self) -> tuple[type, Values]:
        """Return (class of torch.optim, its arguments)."""
        from torch import optim  # not at the top: flags are read without torch

        kinds = {name.lower(): kind for name, kind in vars(optim).items() if isinstance(kind, type)}
        del kinds["optimizer"]  # the base of all
        if self.optimizer not in kinds:
            extra("name")("optimizer", self.optimizer, kinds)
        kind = kinds[self.optimizer]
        arguments = {"lr": self.lr}
        if self.weight_decay or "weight_decay" in inspect.signature(kind).parameters:
            arguments["weight_decay"] = self.weight_decay
        if self.momentum is not None:
            arguments["momentum"] = self.momentum
        if self.optimizer_args:
            arguments |= extra("optimizer_args")(self.optimizer_args, besides=arguments)
        if self.optimizer in FUSED and "foreach" not in arguments:
            arguments = {"fused": True} | arguments
        return kind, arguments

    def identity(self) -> Values:
        """Return all fixed flags, as JSON gives them back, of a file the name; the same on every restart."""
        values = self.to_json()
        return {
            flag.name: without_folder(values[flag.name]) for flag in FLAGS.values() if flag.metadata["fixed"]
        }

    def of_all_ranks(self) -> Values:
        """Return {flag: value} of all that the machines of a life must have in common; of a file the name."""
        return {
            flag_of(name): without_folder(value)
            for name, value in self.to_json().items()
            if name not in OF_A_MACHINE
        }

    def compare(self, old: Values) -> list[str]:
        """Say in words where these options contradict the `old` ones, those of an earlier start."""
        was = {name: without_folder(value) for name, value in old.items()}
        return [
            f"{flag_of(name)} was {was.get(name)!r}, now {now!r}"
            for name, now in self.identity().items()
            if was.get(name) != now
        ]

    def facts_of_the_run(self) -> Values:
        """Return {name: value} of what all ranks had before, beside the options; none if nothing is saved."""
        with suppress(OSError, UserError):
            if self.is_bound:
                facts = read_run(self.run_dir)
                return {"data": facts["data"][:12]} | facts["pinned"] | facts["code"]
        return {}

    @property
    def is_bound(self) -> bool:
        """Return whether a step of this run was saved: until then its options may change."""
        return any(re.match("step-|damaged-", name) for name in os.listdir(self.run_dir / "checkpoints"))

    def refuse_another_run(self, wrong: list[str]) -> None:
        """Refuse the start if something is wrong, by `compare` or others."""
        if wrong:
            raise UserError(
                f"{self.run_dir} is another run: {'; '.join(wrong)}\n"
                "give the same options to go on with it, or another --run-dir\n"
                f"--run-dir NEW --resume {self.run_dir} begins another at its newest checkpoint"
            )

    def to_json(self) -> Values:
        """Return every field, as json.dumps can write it."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def without_folder(value):
    """Return of a file its name alone: it may lie elsewhere on another machine."""
    return value.rpartition("/")[2] if isinstance(value, str) else value


def with_folder(value: Any) -> Any:
    """Return of a user's file the full name: a notebook reads the run from another folder."""
    return str(Path(value).absolute()) if isinstance(value, str) and ".py:" in value else value


FLAGS = {flag_of(field.name): field for field in dataclasses.fields(Options)[1:]}


def read_run(run_dir: Path | str) -> Facts:
    """Read what a run's options.json holds; UserError if that is damaged."""
    path = Path(run_dir, "options.json")
    with blamed(str(run_dir), "name the folder of a run"):
        if not path.is_file():
            raise FileNotFoundError(path)
        try:
            return unsealed(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"options.json is damaged: {error}") from error


def read_options(run_dir: Path | str) -> Values:
    """Read the options of a run's newest life from its options.json."""
    return read_run(run_dir)["options"]
