"""Which flags contradict each other, this world or this machine's files; each such pair is an error."""
import os
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean
from common.options.flags import flag_of
from common.options.optimizers import OURS, keywords

FOLDERS = ("data_dir", "workers", "image_size", "bad_samples")
DATASETS: dict[str, tuple[str, ...]] = {  # each with the flags that it alone, or with a few others, looks at
    "digits": (), "mnist": ("data_dir", "download"), "fashion-mnist": ("data_dir", "download"),
    "cifar10": ("data_dir", "download"), "imagefolder": FOLDERS, "sentiment": (), "random": (),
    "text": ("data_dir",), "tokens": ("data_dir", "vocab_size")}
OWN_DATASET = FOLDERS               # of path/to/file.py:function
SIZED = ("random", "text", "tokens")  # their names may end in :SIZE
TASKS = ("classify", "tokens")

ONE = "leave out one of them"
OUT = "leave it out"
CLASHES = (  # the first cannot take effect with the second, because ...
    ("--shard", "--virtual-ranks", "its sums depend on the number of replicas"),
    ("--micro-batch-size", "--virtual-ranks", "a slice is one forward, so its size is already fixed"),
    ("--sync-bn", "--virtual-ranks", "statistics over all ranks would depend on their number"),
    ("--compile", "--virtual-ranks", "compiled code depends on the shapes a process saw, so on the world"),
    ("--cross-check", "--virtual-ranks 0", "without slices no two ranks compute the same bits"),
    ("--sync-bn", "--bad-samples", "it needs a sample in each forward of each rank"),
    ("--sync-bn", "--device cpu", "it works on GPUs only"),
    ("--amp fp16", "--device cpu", "it works on GPUs only, --amp bf16 on all"),
    ("--patience", "--eval-every 0", "it counts evaluations"),
    ("--lr-schedule", "--optimizer rprop", "it looks at lr once"),
    ("--warmup-epochs", "--optimizer rprop", "it looks at lr once"),
    ("--min-lr", "--lr-schedule constant", "nothing falls"),
    ("--min-lr", "--lr-schedule *.py", "let the function do it"),
    ("--warmup-epochs", "--lr-schedule *.py", "let the function do it"),
    ("--optimizer-args", "--optimizer *.py", "let the function do it"),
    ("--no-decay-1d", "--optimizer *.py", "let the function do it"),
    ("--no-decay-1d", "--weight-decay 0.0", "there is no decay"),
    ("--label-smoothing", "--task *.py", "let the function do it"),
    ("--init-skip", "--init-from ", "nothing is taken over"),
    ("--init-from", "--resume", "both say where the weights come from"))


def uses(dataset: str) -> tuple[str, ...]:
    """The flags of DATASETS that can take effect with this dataset."""
    return OWN_DATASET if ".py" in dataset else DATASETS.get(kind_of(dataset), ())


def kind_of(dataset: str) -> str:
    """The name of a built-in dataset, without its size."""
    name = dataset.partition(":")[0]
    return name if name in SIZED else dataset


def check_together(opts: Any) -> None:
    """UserError for flags that contradict each other or cannot take effect together."""
    defaults = type(opts)(script=opts.script, dataset=opts.dataset, task=opts.task)

    def given(flag):
        name, wanted, text = flag[2:].replace("-", "_").partition(" ")
        value = getattr(opts, name)
        if not wanted:
            return value != getattr(defaults, name)
        return ".py" in str(value) if text == "*.py" else str(value) == flag.partition(" ")[2]

    for flag, other, why in CLASHES:
        if given(flag) and given(other):
            raise UserError(f"{flag} cannot take effect with {other.rstrip()}: {why}\n{ONE}")
    _check_dataset(opts, defaults)
    if ".py" not in opts.task and opts.task not in TASKS:
        raise UserError(f"--task: {opts.task!r} is no task{did_you_mean(opts.task, TASKS)}\n"
                        f"there are {', '.join(TASKS)}, and path/to/file.py:function")
    if opts.virtual_ranks > opts.global_batch_size:
        raise UserError(f"--virtual-ranks {opts.virtual_ranks} cuts --global-batch-size "
                        f"{opts.global_batch_size} into slices without samples\n"
                        f"use --virtual-ranks {opts.global_batch_size} at most")
    if opts.shard and opts.optimizer not in OURS:
        raise UserError(f"--shard works with {', '.join(OURS)}\n"
                        f"{opts.optimizer} may need a whole weight at once")
    if opts.min_lr >= opts.lr:
        raise UserError(f"--min-lr {opts.min_lr} is not below --lr {opts.lr}\nlower it")
    if keywords(opts.optimizer_args).get("dampening"):
        raise UserError("--optimizer-args: dampening would also damp the first step, which torch does not\n"
                        f"{OUT}")
    _check_devices(opts)


def _check_dataset(opts, defaults):
    name = opts.dataset
    if ".py" not in name and kind_of(name) not in DATASETS:
        raise UserError(f"--dataset: {name!r} is no dataset{did_you_mean(name, DATASETS)}\n"
                        f"there are {', '.join(DATASETS)}, and path/to/file.py:function")
    special = {flag for flags in DATASETS.values() for flag in flags} - {*uses(name)}
    idle = [flag_of(flag) for flag in sorted(special) if getattr(opts, flag) != getattr(defaults, flag)]
    if idle:
        raise UserError(f"{', '.join(idle)} cannot take effect with --dataset {name}\n{OUT}")


def _check_devices(opts):
    kinds = {device.partition(":")[0] for device in opts.devices}
    devices = f"--devices {','.join(opts.devices)}"
    if opts.device != "auto" and kinds - {opts.device}:
        raise UserError(f"{devices} contradicts --device {opts.device}\n{ONE}")
    if opts.script == "dp" and len(kinds) > 1:
        raise UserError(f"{devices}: train_dp.py needs devices of one kind\nname one kind")
    if opts.script == "mp" and len(opts.devices) == 1:
        raise UserError(f"{devices}: a net is split over two devices or more\nfor example --devices cpu,cpu")


def check_world(opts: Any, world: int) -> None:
    """UserError for flags that need another number of processes."""
    processes = f"{world} process{'es' * (world > 1)}"
    stages = opts.stages or world
    if opts.script == "dp" and world > 1:
        raise UserError(f"train_dp.py is one process for many devices, but WORLD_SIZE={world}\n"
                        "use train_ddp.py with torchrun, or start train_dp.py with python")
    if world % stages:
        raise UserError(f"--stages {stages}: {processes} cannot be divided into groups of {stages}\n"
                        f"start a multiple of it (torchrun --nproc_per_node={stages}), or leave out --stages")
    if opts.script == "mp" and opts.devices and (world > 1 or opts.stages):
        raise UserError("--devices is for a single process; here each process has one device\n"
                        "leave it out, or start with python")
    if opts.shard and world // stages < 2:
        raise UserError(f"--shard spreads a stage over its replicas, but {processes} in {stages} stages have "
                        "one of each\nstart more processes, or use fewer stages (--stages 1)")
    replicas = world // stages if opts.script == "mp" else world
    if opts.virtual_ranks and replicas > opts.virtual_ranks:
        most = opts.virtual_ranks * (world // replicas)
        raise UserError(f"WORLD_SIZE={world} makes {replicas} replicas, more than --virtual-ranks "
                        f"{opts.virtual_ranks}\nstart at most {most} processes")


def check_files(opts: Any) -> None:
    """UserError for files and folders that are not there; answered before torch is imported."""
    if opts.resume != "auto" and not os.path.isdir(opts.resume):
        raise UserError(f"--resume: {opts.resume!r} is no folder\ngive a checkpoint's folder, or auto\n"
                        "to start afresh, give --run-dir NEW or move the run's folder away")
    if opts.init_from not in ("", "pretrained") and not os.path.isfile(opts.init_from):
        raise UserError(f"--init-from: {opts.init_from!r} is no file\n"
                        "give a file of weights, .safetensors or written by torch.save")
    if opts.run_dir.resolve() == Path(opts.run_dir.resolve().anchor):
        raise UserError(f"--run-dir: {str(opts.run_dir)!r} is the root of the file system\n"
                        "give the run a folder of its own")
    place = next(path for path in (opts.run_dir, *opts.run_dir.parents) if os.path.lexists(path))
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        raise UserError(f"--run-dir: {str(place)!r} is not a folder that can be written to\n"
                        "give the run a folder of its own")
