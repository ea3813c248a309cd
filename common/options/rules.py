"""Which flags contradict each other, this world or this machine's disks; each such pair is an error."""
import os
from pathlib import Path

from common.errors import UserError, did_you_mean
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
NOT_WITH_VIRTUAL_RANKS = {  # and why
    "--micro-batch-size": "a slice is one forward, so its size is already fixed",
    "--sync-bn": "statistics over all ranks would depend on their number",
    "--compile": "compiled code depends on the shapes a process has seen, so on the world"}


def uses(dataset):
    """The flags of DATASET_FLAGS that can take effect with this dataset, or with a user's own function."""
    if ".py" in dataset:
        return FOLDERS
    name, _, size = dataset.partition(":")
    return DATASET_FLAGS.get(name if name in SIZED else dataset, ())


def check_together(opts):
    """Flags that contradict each other or cannot take effect together."""
    name, known, defaults = opts.dataset, uses(opts.dataset), type(opts)(dataset=opts.dataset)
    idle = [f for f in dict.fromkeys(FILES + FOLDERS + ("vocab_size",))
            if f not in known and getattr(opts, f) != getattr(defaults, f)]
    other = next((flag for flag in NOT_WITH_VIRTUAL_RANKS if getattr(opts, flag[2:].replace("-", "_"))), "")
    kinds = {device.partition(":")[0] for device in opts.devices}
    checkpoint, one = opts.resume not in ("auto", "none"), "leave out one of them"
    smooth = opts.label_smoothing and "--label-smoothing" if ".py" in opts.task else ""
    shaped = smooth or opts.task != "classify" and (opts.mixup and "--mixup" or opts.cutmix and "--cutmix")
    _refuse(
        (".py" not in opts.task and opts.task not in TASKS,
         f"--task: {opts.task!r} is no task{did_you_mean(opts.task, TASKS)}\n"
         f"there are {', '.join(TASKS)}, and path/to/file.py:function"),
        (shaped, f"{shaped} cannot take effect with --task {opts.task}\nleave it out"),
        (opts.shard and opts.virtual_ranks,
         "--shard cannot take effect with --virtual-ranks: its sums depend on the replicas' number\n" + one),
        (opts.script == "mp" and opts.virtual_ranks and opts.schedule != "1f1b",
         "--schedule cannot take effect with --virtual-ranks: slices are summed in a fixed order\n" + one),
        (name not in DATASET_FLAGS and not known,
         f"--dataset: {name!r} is no dataset{did_you_mean(name, DATASET_FLAGS)}\n"
         f"there are {', '.join(DATASET_FLAGS)}, and path/to/file.py:function"),
        (idle, f"{', '.join(map(flag_of, idle))} cannot take effect with --dataset {name}\nleave it out"),
        (opts.init_skip and not opts.init_from,
         "--init-skip cannot take effect without --init-from\nname the file of weights with --init-from"),
        (opts.init_from and checkpoint,
         "--init-from and --resume PATH both say where the weights come from\n" + one),
        (opts.eval_only and opts.resume == "none" and not opts.init_from,
         "--eval-only with --resume none: there is nothing to evaluate\n"
         "leave out --resume none, or give --init-from"),
        (opts.patience and not opts.eval_every,
         "--patience cannot take effect with --eval-every 0: it counts evaluations\n" + one),
        (opts.virtual_ranks > opts.global_batch_size,
         f"--virtual-ranks {opts.virtual_ranks} cuts --global-batch-size {opts.global_batch_size} into "
         "slices without samples\n"
         f"use --virtual-ranks {opts.global_batch_size} at most"),
        (opts.cross_check and not opts.virtual_ranks,
         "--cross-check needs --virtual-ranks: without it no two ranks compute the same bits\n"
         "give --virtual-ranks N, or leave it out"),
        (opts.virtual_ranks and other,
         f"{other} cannot take effect with --virtual-ranks: {NOT_WITH_VIRTUAL_RANKS.get(other)}\n" + one),
        (opts.sync_bn and opts.bad_samples == "skip",
         "--sync-bn needs a sample in each forward of each rank, --bad-samples skip may leave none\n" + one),
        (opts.sync_bn and opts.device == "cpu",
         "--sync-bn works on GPUs only, but --device is cpu\n" + one),
        (opts.amp == "fp16" and opts.device == "cpu",
         "--amp fp16 works on GPUs only, but --device is cpu\nuse --amp bf16, or leave out --device cpu"),
        (opts.device in ("cpu", "cuda") and kinds - {opts.device},
         f"--devices {','.join(opts.devices)} contradicts --device {opts.device}\n" + one),
        (opts.script == "dp" and len(kinds) > 1,
         f"--devices {','.join(opts.devices)}: train_dp.py needs devices of one kind\nname one kind"),
        (opts.script == "mp" and len(opts.devices) == 1,
         f"--devices {','.join(opts.devices)}: a model is split over two devices or more\n"
         "for example --devices cpu,cpu"))
    check_optimizer(opts)


def check_optimizer(opts):
    """Flags of the update rule, each of which the chosen one must take."""
    name, args, given = opts.optimizer, keywords(opts.optimizer_args), [f for f in FLAGS if getattr(opts, f)]
    own, schedule = ".py" in name, opts.lr_schedule
    arguments = {} if own or name not in known() else takes(name)
    idle = [f for f in given if f not in arguments and not own]
    unknown, both = [a for a in args if a not in arguments], [a for a in args if a in given]
    _refuse(
        (not own and name not in known(),
         f"--optimizer: {name!r} is none of {', '.join(known())}{did_you_mean(name, known())}\n"
         "or write a function: path/to/file.py:function"),
        (name in REFUSED, f"--optimizer {name} cannot train here: {REFUSED.get(name)}\nchoose another"),
        (own and (args or opts.no_decay_1d),
         f"--{'optimizer-args' if args else 'no-decay-1d'} cannot take effect with a function\n"
         "let the function do it"),
        (unknown, f"--optimizer-args: {name} takes no {', '.join(unknown)}\nit takes {', '.join(arguments)}"),
        (both, f"--optimizer-args: {', '.join(both)} has a flag of its own\n"
         f"use {' '.join(map(flag_of, both))} alone"),
        (idle, f"{', '.join(map(flag_of, idle))} cannot take effect with --optimizer {name}\n"
         f"leave it out; {name} takes {', '.join(arguments)}"),
        (args.get("dampening"),
         "--optimizer-args: dampening would also damp the first step, which torch does not\nleave it out"),
        (opts.shard and name not in LR,
         f"--shard works with {', '.join(LR)}; {name} may need a whole weight at once\nchoose one of them"),
        (opts.no_decay_1d and not (opts.weight_decay or args.get("weight_decay")),
         "--no-decay-1d cannot take effect without --weight-decay\nleave it out"),
        (name == "rprop" and (schedule != "constant" or opts.warmup_epochs),
         "--lr-schedule and --warmup-epochs cannot take effect with --optimizer rprop: it looks at lr once\n"
         "leave them out"),
        (".py" in schedule and (opts.warmup_epochs or opts.min_lr),
         "--warmup-epochs and --min-lr cannot take effect with a function as --lr-schedule\n"
         "let the function do it"),
        (opts.min_lr and schedule == "constant",
         "--min-lr cannot take effect with --lr-schedule constant\nuse step or cosine"),
        (opts.min_lr >= opts.lr, f"--min-lr {opts.min_lr} is not below --lr {opts.lr}\nlower it"))


def check_world(opts, world):
    """Flags that need another number of processes."""
    processes, stages = f"{world} process{'es' * (world > 1)}", opts.stages or world
    replicas = max(1, world // stages) if opts.script == "mp" else world
    _refuse(
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


def _refuse(*rules):
    """Raises the first of these (broken, message) that is broken."""
    for broken, message in rules:
        if broken:
            raise UserError(message)


def check_data(opts):
    """The parts of a dataset that has two in its folder."""
    kind, names = opts.dataset.partition(":")[0], (opts.train_folder, opts.val_folder)
    for flag, name in zip(("--train-folder", "--val-folder"), names, strict=True):
        folder = Path(opts.data_dir, name)
        if kind == "imagefolder" and not folder.is_dir():
            there = sorted(path.name for path in Path(opts.data_dir).glob("*") if path.is_dir())[:5]
            raise UserError(f"dataset imagefolder: {folder} is not there\n"
                            f"--data-dir must have {names[0]}/CLASS/IMAGE and {names[1]}/CLASS/IMAGE\n"
                            f"or give {flag} NAME; its folders are {', '.join(there) or 'none'}")
        if kind == "tar" and not [*folder.glob("*.tar"), *folder.parent.glob(f"{name}*.tar")]:
            raise UserError(f"dataset tar: neither {folder}/*.tar nor {folder}*.tar is there\n"
                            f"--data-dir names the folder of the shards, {flag} how they begin")
        if kind == "tokens" and not Path(opts.data_dir, f"{name}.bin").is_file():
            raise UserError(f"dataset tokens: {folder}.bin is not there\n"
                            "--data-dir must have train.bin and val.bin, as nanoGPT writes them")


def check_places(opts):
    """The files and folders that flags name; checked without torch, before the processes meet."""
    run, own_folder = opts.run_dir, "\ngive the run a folder of its own"
    try:
        if opts.resume not in ("auto", "none") and not os.path.isdir(opts.resume):
            raise UserError(f"--resume: {opts.resume!r} is no folder\n"
                            "give a checkpoint's folder, auto or none")
        if opts.init_from not in ("", "pretrained") and not os.path.isfile(opts.init_from):
            raise UserError(f"--init-from: {opts.init_from!r} is no file\n"
                            "give a file of weights, .safetensors or written by torch.save")
        if opts.memory_tier not in ("auto", "off") and not os.path.isdir(opts.memory_tier):
            raise UserError(f"--memory-tier: {opts.memory_tier!r} is no folder\n"
                            "name a folder in memory, as /dev/shm, or use auto or off")
        if opts.log_to and not os.path.isfile(opts.log_to.rpartition(":")[0]):
            raise UserError(f"--log-to: {opts.log_to!r} names no file\nwrite path/to/file.py:function")
        whole_path = run.resolve()
        if whole_path == Path(whole_path.anchor):
            raise UserError(f"--run-dir: {str(run)!r} is the root of the file system{own_folder}")
        if whole_path == Path(opts.data_dir).resolve():
            raise UserError(f"--run-dir: {str(run)!r} is also the data folder{own_folder}")
        check_data(opts)
        there = next(place for place in (run, *run.parents) if os.path.lexists(place))
        if not there.is_dir():
            raise UserError(f"--run-dir: {str(there)!r} is not a folder{own_folder}")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"--run-dir: {str(there)!r} is not writable\n"
                            "choose another place, or change its permissions")
        os.stat(run)
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError) as error:  # too long a name, a circle of links, no permission
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--run-dir: {str(run)!r} cannot be used ({reason})\n"
                        "choose another place") from None
