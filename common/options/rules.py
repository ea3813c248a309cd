"""Which flags contradict each other, this world or this machine's disks; each such pair is an error."""
import os
from pathlib import Path

from common.errors import UserError, did_you_mean, refuse
from common.options.flags import flag_of
from common.options.optimizers import FLAGS, LR, REFUSED, keywords, known, takes

FILES, IMAGES = ("data_dir", "download"), ("mixup", "cutmix")
FOLDERS = ("data_dir", "workers", "train_folder", "val_folder", "image_size", "bad_samples", *IMAGES)
DATASET_FLAGS = {  # the flags that can take effect with this dataset, of those that depend on it
    "digits": IMAGES, "mnist": FILES + IMAGES, "fashion-mnist": FILES + IMAGES, "cifar10": FILES + IMAGES,
    "imagefolder": FOLDERS, "tar": FOLDERS, "sentiment": (), "sentiment-large": (), "random": ("mixup",),
    "text": ("data_dir",), "tokens": ("data_dir", "vocab_size")}
SIZED = ("random", "text", "tokens")  # their names may end in :SIZE

TASKS = ("classify", "tokens")
ONE, OUT = "leave out one of them", "leave it out"
CLASHES = (  # the first cannot take effect with the second, because ...
    ("--shard", "--virtual-ranks", "its sums depend on the number of replicas"),
    ("--micro-batch-size", "--virtual-ranks", "a slice is one forward, so its size is already fixed"),
    ("--sync-bn", "--virtual-ranks", "statistics over all ranks would depend on their number"),
    ("--compile", "--virtual-ranks", "compiled code depends on the shapes a process saw, so on the world"),
    ("--schedule", "--virtual-ranks", "slices are summed in a fixed order"),
    ("--cross-check", "--virtual-ranks 0", "without slices no two ranks compute the same bits"),
    ("--sync-bn", "--bad-samples", "it needs a sample in each forward of each rank"),
    ("--sync-bn", "--device cpu", "it works on GPUs only"),
    ("--amp fp16", "--device cpu", "it works on GPUs only, --amp bf16 on all"),
    ("--patience", "--eval-every 0", "it counts evaluations"),
    ("--lr-schedule", "--optimizer rprop", "it looks at lr once"),
    ("--warmup-epochs", "--optimizer rprop", "it looks at lr once"),
    ("--min-lr", "--lr-schedule constant", "nothing falls"))


def uses(dataset):
    """The flags of DATASET_FLAGS that can take effect with this dataset, or with a user's own function."""
    if ".py" in dataset:
        return FOLDERS
    name, _, size = dataset.partition(":")
    return DATASET_FLAGS.get(name if name in SIZED else dataset, ())


def check_together(opts):
    """Flags that contradict each other or cannot take effect together."""
    defaults = type(opts)(dataset=opts.dataset)

    def given(flag):
        name, _, value = flag[2:].partition(" ")
        found = getattr(opts, name.replace("-", "_"))
        return str(found) == value if value else found != getattr(defaults, name.replace("-", "_"))

    name, known, own = opts.dataset, uses(opts.dataset), ".py" in opts.task
    idle = [f for f in dict.fromkeys(FILES + FOLDERS + ("vocab_size",))
            if f not in known and getattr(opts, f) != getattr(defaults, f)]
    shaped = [flag for flag in ("--label-smoothing", "--mixup", "--cutmix")
              if given(flag) and (own or opts.task != "classify" and flag != "--label-smoothing")]
    kinds = {device.partition(":")[0] for device in opts.devices}
    devices = f"--devices {','.join(opts.devices)}"
    refuse(
        (not own and opts.task not in TASKS,
         f"--task: {opts.task!r} is no task{did_you_mean(opts.task, TASKS)}\n"
         f"there are {', '.join(TASKS)}, and path/to/file.py:function"),
        (shaped, f"{', '.join(shaped)} cannot take effect with --task {opts.task}\n{OUT}"),
        (name not in DATASET_FLAGS and not known,
         f"--dataset: {name!r} is no dataset{did_you_mean(name, DATASET_FLAGS)}\n"
         f"there are {', '.join(DATASET_FLAGS)}, and path/to/file.py:function"),
        (idle, f"{', '.join(map(flag_of, idle))} cannot take effect with --dataset {name}\n{OUT}"),
        (opts.init_skip and not opts.init_from,
         "--init-skip cannot take effect without --init-from\nname the file of weights with --init-from"),
        (opts.init_from and opts.resume not in ("auto", "none"),
         f"--init-from and --resume PATH both say where the weights come from\n{ONE}"),
        (opts.eval_only and opts.resume == "none" and not opts.init_from,
         "--eval-only with --resume none: there is nothing to evaluate\n"
         "leave out --resume none, or give --init-from"),
        (opts.virtual_ranks > opts.global_batch_size,
         f"--virtual-ranks {opts.virtual_ranks} cuts --global-batch-size {opts.global_batch_size} into "
         f"slices without samples\nuse --virtual-ranks {opts.global_batch_size} at most"),
        (opts.device in ("cpu", "cuda") and kinds - {opts.device},
         f"{devices} contradicts --device {opts.device}\n{ONE}"),
        (opts.script == "dp" and len(kinds) > 1,
         f"{devices}: train_dp.py needs devices of one kind\nname one kind"),
        (opts.script == "mp" and len(opts.devices) == 1,
         f"{devices}: a model is split over two devices or more\nfor example --devices cpu,cpu"))
    check_optimizer(opts)
    refuse(*((given(flag) and given(other), f"{flag} cannot take effect with {other}: {why}\n{ONE}")
              for flag, other, why in CLASHES))


def check_optimizer(opts):
    """Flags of the update rule, each of which the chosen one must take."""
    name, args, given = opts.optimizer, keywords(opts.optimizer_args), [f for f in FLAGS if getattr(opts, f)]
    own, theirs = ".py" in name, "let the function do it"
    arguments = {} if own or name not in known() else takes(name)
    idle = [f for f in given if f not in arguments and not own]
    unknown, both = [a for a in args if a not in arguments], [a for a in args if a in given]
    refuse(
        (not own and name not in known(),
         f"--optimizer: {name!r} is none of {', '.join(known())}{did_you_mean(name, known())}\n"
         "or write a function: path/to/file.py:function"),
        (name in REFUSED, f"--optimizer {name} cannot train here: {REFUSED.get(name)}\nchoose another"),
        (own and (args or opts.no_decay_1d),
         f"--{'optimizer-args' if args else 'no-decay-1d'} cannot take effect with a function\n{theirs}"),
        (unknown, f"--optimizer-args: {name} takes no {', '.join(unknown)}\nit takes {', '.join(arguments)}"),
        (both, f"--optimizer-args: {', '.join(both)} has a flag of its own\n"
         f"use only {' '.join(map(flag_of, both))}"),
        (idle, f"{', '.join(map(flag_of, idle))} cannot take effect with --optimizer {name}\n"
         f"{OUT}; {name} takes {', '.join(arguments)}"),
        (args.get("dampening"),
         f"--optimizer-args: dampening would also damp the first step, which torch does not\n{OUT}"),
        (opts.shard and name not in LR,
         f"--shard works with {', '.join(LR)}; {name} may need a whole weight at once\nchoose one of them"),
        (opts.no_decay_1d and not (opts.weight_decay or args.get("weight_decay")),
         f"--no-decay-1d cannot take effect without --weight-decay\n{OUT}"),
        (".py" in opts.lr_schedule and (opts.warmup_epochs or opts.min_lr),
         f"--warmup-epochs and --min-lr cannot take effect with a function as --lr-schedule\n{theirs}"),
        (opts.min_lr >= opts.lr, f"--min-lr {opts.min_lr} is not below --lr {opts.lr}\nlower it"))


def check_world(opts, world):
    """Flags that need another number of processes."""
    processes, stages = f"{world} process{'es' * (world > 1)}", opts.stages or world
    replicas = max(1, world // stages) if opts.script == "mp" else world
    refuse(
        (opts.script == "dp" and world > 1,
         f"train_dp.py is one process for many devices, but WORLD_SIZE={world}\n"
         "use train_ddp.py with torchrun, or start train_dp.py with python"),
        (opts.stages and world % opts.stages,
         f"--stages {opts.stages}: {processes} cannot be divided into groups of {opts.stages}\n"
         f"start a multiple of it (torchrun --nproc_per_node={opts.stages}), or leave out --stages"),
        (opts.script == "mp" and opts.devices and (world > 1 or opts.stages),
         "--devices is for a single process; here each process has one device\n"
         "leave it out, or start with python"),
        (opts.memory_tier not in ("auto", "off") and (opts.shard or opts.script == "mp" and stages > 1),
         f"--memory-tier {opts.memory_tier} cannot take effect: each process has only a part of the net\n"
         "leave it out: their parts go to the disk"),
        (opts.shard and world // stages < 2,
         f"--shard spreads a stage over its replicas, but {processes} in {stages} stages have one of each\n"
         "start more processes, or use fewer stages (--stages 1)"),
        (opts.virtual_ranks and replicas > opts.virtual_ranks,
         f"WORLD_SIZE={world} makes {replicas} replicas, more than --virtual-ranks {opts.virtual_ranks}\n"
         f"start at most {opts.virtual_ranks * (world // replicas)} processes"))


def check_data(opts):
    """UserError if a dataset's folder lacks the part to train on, or the one to evaluate on."""
    kind, names = opts.dataset.partition(":")[0], (opts.train_folder, opts.val_folder)
    for flag, name in zip(("--train-folder", "--val-folder"), names, strict=True):
        folder = Path(opts.data_dir, name)
        if kind == "imagefolder" and not folder.is_dir():
            there = sorted(path.name for path in Path(opts.data_dir).glob("*") if path.is_dir())[:5]
            raise UserError(f"dataset imagefolder: {folder} does not exist\n"
                            f"--data-dir must have {names[0]}/CLASS/IMAGE and {names[1]}/CLASS/IMAGE\n"
                            f"or give {flag} NAME; its folders are {', '.join(there) or 'none'}")
        if kind == "tar" and not [*folder.glob("*.tar"), *folder.parent.glob(f"{name}*.tar")]:
            raise UserError(f"dataset tar: neither {folder}/*.tar nor {folder}*.tar exists\n"
                            f"--data-dir names the folder of the shards, {flag} how they begin")
        if kind == "tokens" and not Path(opts.data_dir, f"{name}.bin").is_file():
            raise UserError(f"dataset tokens: {folder}.bin does not exist\n"
                            "--data-dir must have train.bin and val.bin, as nanoGPT writes them")


def check_places(opts):
    """The files and folders that flags name; checked without torch, before the processes meet."""
    run, own_folder = opts.run_dir, "\ngive the run a folder of its own"
    try:
        refuse(
            (opts.resume not in ("auto", "none") and not os.path.isdir(opts.resume),
             f"--resume: {opts.resume!r} is no folder\ngive a checkpoint's folder, auto or none"),
            (opts.init_from not in ("", "pretrained") and not os.path.isfile(opts.init_from),
             f"--init-from: {opts.init_from!r} is no file\n"
             "give a file of weights, .safetensors or written by torch.save"),
            (opts.memory_tier not in ("auto", "off") and not os.path.isdir(opts.memory_tier),
             f"--memory-tier: {opts.memory_tier!r} is no folder\n"
             "name a folder in memory, as /dev/shm, or use auto or off"),
            (opts.log_to and not os.path.isfile(opts.log_to.rpartition(":")[0]),
             f"--log-to: {opts.log_to!r} names no file\nwrite path/to/file.py:function"),
            (run.resolve() == Path(run.resolve().anchor),
             f"--run-dir: {str(run)!r} is the root of the file system{own_folder}"),
            (run.resolve() == Path(opts.data_dir).resolve(),
             f"--run-dir: {str(run)!r} is also the data folder{own_folder}"))
        check_data(opts)
        there = next(place for place in (run, *run.parents) if os.path.lexists(place))
        refuse(
            (not there.is_dir(), f"--run-dir: {str(there)!r} is not a folder{own_folder}"),
            (not os.access(there, os.W_OK | os.X_OK),
             f"--run-dir: {str(there)!r} is not writable\nchoose another place, or change its permissions"))
        os.stat(run)
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError) as error:  # too long a name, a circle of links, no permission
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--run-dir: {str(run)!r} cannot be used ({reason})\n"
                        "choose another place") from None
