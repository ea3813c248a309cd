"""The names that flags know, and the functions they stand for. No torch here: a typo answers at once.

To add a net or a dataset, write its function and name it here as `module:function`; `find_function` imports
it when it is needed. Code that lives elsewhere needs no name: `--model path/to/file.py:function`.
"""

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.errors import blamed

MODELS = {  # name: its function of (data), or (data, size)
    "net": "common.models.nets:build_net",
    "mlp": "common.extras.nets:build_mlp",
    "lstm": "common.extras.nets:build_lstm",
    "gpt": "common.extras.gpt:build_gpt",
}
FOLDERS = ("data_dir", "workers", "image_size", "bad_samples")  # also of path/to/file.py:function
DATASETS = {  # name: its function of (options), and the flags that not every dataset uses
    "digits": ("common.data.datasets:digits", ()),
    "mnist": ("common.extras.datasets:mnist", ("data_dir", "download")),
    "fashion-mnist": ("common.extras.datasets:fashion_mnist", ("data_dir", "download")),
    "cifar10": ("common.extras.datasets:cifar10", ("data_dir", "download")),
    "imagefolder": ("common.extras.datasets:imagefolder", FOLDERS),
    "sentiment": ("common.extras.datasets:sentiment", ()),
    "random": ("common.extras.datasets:random_numbers", ()),
    "text": ("common.extras.datasets:text", ("data_dir",)),
    "tokens": ("common.extras.datasets:tokens", ("data_dir", "vocab_size")),
}
# What is imported only where an option, a name, an argument of Elastic or a terminal asks for it.
EXTRAS: dict[str, str] = {
    "name": "common.extras.rules:check_name",  # that is not in NAMES
    "rules": "common.extras.rules:check_flags",  # of more flags than a first run gives
    "rules_of_arguments": "common.extras.rules:check_arguments",
    "no_meeting": "common.extras.rules:refuse_to_meet",
    "unknown_flag": "common.extras.rules:refuse_flag",
    "optimizer_args": "common.extras.rules:keywords",
    "own_file": "common.extras.own_files:load_file",
    "own_data": "common.extras.own_data:own_data",
    "dataset": "common.extras.own_data:DatasetSamples",
    "as_input": "common.extras.own_data:as_input",  # of numbers that are no pictures
    "uniforms": "common.extras.datasets:uniforms",
    "bar": "common.extras.bar:Bar",
    "torchvision": "common.extras.nets:build_torchvision",
    "own_net": "common.extras.own_data:own_net",
    "task": "common.extras.tasks:task_of",  # other than classify
    "loss": "common.extras.tasks:loss_of",  # of a loop of one's own
    "end_mean": "common.extras.tasks:end_mean",  # of a loss that counts other things than samples
    "answers": "common.extras.tasks:answers",  # of a small test set
    "judge": "common.extras.tasks:Judge",
    "schedule": "common.extras.schedules:learning_rate",  # other than constant
    "own_optimizer": "common.extras.own_data:own_optimizer",
    "no_decay_1d": "common.extras.own_data:groups_without_decay",
    "init_from": "common.extras.weights:load_weights",
    "fork": "common.extras.own_files:inherited_flags",
    "changed": "common.extras.changed:refuse_changes",  # options, data, code or machine of a run
    "lost_options": "common.extras.changed:facts_of_the_newest",
    "take_over": "common.extras.take_over:take_over",  # of other data, or without the best one
    "another_run": "common.extras.weights:load_another_run",  # with fork or resume
    "freeze": "common.extras.weights:freeze",  # also parts that a net of a user's own has frozen
    "frozen": "common.extras.frozen:FrozenLayout",  # of a net with such weights
    "exports": "common.extras.exports:main",  # python -m common.checkpoint
    "report": "common.extras.report:main",  # python -m common.ledger
    "load": "common.extras.weights:load",
    "tokens": "common.extras.datasets:refuse_unshifted",
    "workers": "common.extras.workers:from_workers",
    "ema_decay": "common.extras.averages:Averages",
    "fp16": "common.extras.fp16:Scaler",
    "buffers": "common.extras.buffers:MeanOfBuffers",  # of a net that has some, over several ranks
    "no_progress": "common.extras.no_progress:refuse_without_progress",  # since the life before
    "audit": "common.extras.audit:Audit",
    "deaths": "common.extras.lives:deaths_of",  # of the life before
    "pace": "common.extras.pace:Pace",  # of several ranks
    "virtual_ranks": "common.extras.bits:gradient_of_slices",
    "bit_facts": "common.extras.bits:facts",  # with virtual_ranks
    "cross_check": "common.extras.votes:VotedGradient",
    "count_votes": "common.extras.votes:count_votes",
    "digest_every": "common.extras.replay:note_digest",
    "rehearsed": "common.extras.rehearsed:was_rehearsed",  # of code of one's own
    "copy_to": "common.extras.bucket:Bucket",
    "memory": "common.extras.memory:Memory",  # also for an optimizer that is not torch's own
    "arguments": "common.extras.arguments:options_of",  # in place of flags
    "in_arguments": "common.extras.arguments:in_arguments",
    "mean": "common.extras.all_ranks:mean",
    "gather": "common.extras.all_ranks:rows",
    "owner": "common.extras.owner:wait_for_owner",  # of a run folder, which lives
    "relay": "common.extras.relay:relay",  # to ranks that cannot read a checkpoint
    "pinned": "common.extras.devices:pinned",  # on one GPU
    "own_share": "common.extras.gpus:own_share",  # of the GPUs that a process sees
    "nccl": "common.extras.gpus:nccl",
    "reports": "common.extras.all_ranks:warn_of_other_reports",
    "differ": "common.extras.differ:refuse_replicas",  # ranks whose weights are not the same
    "turns": "common.extras.turns:Turns",
    "devices": "common.extras.devices:named_devices",  # also of a net that is placed
    "interface": "common.extras.machines:interface_towards",  # of several machines
    "machines": "common.extras.machines:refuse_several_machines",  # without LOCAL_WORLD_SIZE
}
SIZED = ("gpt", "random", "text", "tokens")  # these names may end in :SIZE
NAMES: dict[str, Collection[str]] = {  # of the flags that also take path/to/file.py:function
    "model": MODELS,
    "dataset": DATASETS,
    "task": ("classify", "tokens"),
    "lr_schedule": ("constant", "step", "cosine"),
    "optimizer": (),  # torch.optim has the names: they are looked up there
}
RATE = 1e-3
RATES = {  # torch's own where they are not RATE; sgd has ours; tests/training compares them with torch
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
FUSED = ("sgd", "adam", "adamw")  # each weight's update is its own


def flag_of(name: str) -> str:
    return "--no-tensorboard" if name == "tensorboard" else "--" + name.replace("_", "-")


def find_function(place: str, *default: None) -> Any:
    """Import the function that `place` names; `default`, if one is given and there is no such function."""
    module, _, name = place.rpartition(":")
    with blamed(place):
        if module.endswith(".py"):
            found = extra("own_file")(Path(module).resolve())
        else:
            found = importlib.import_module(module)
        return getattr(found, name, *default)


def extra(name: str) -> Any:
    """Import what EXTRAS names: the one way from the core to an extra."""
    return find_function(EXTRAS[name])


def kind_of(name: str) -> str:
    """Return a name without its size."""
    kind = name.partition(":")[0]
    return kind if kind in SIZED else name
