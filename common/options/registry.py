"""The names that flags know. No torch here: --help and a typo answer at once.

To add a net or a dataset, write its function and name it here as `module:function`; `find_function` imports
it when it is needed. Code that lives elsewhere needs no name: `--model path/to/file.py:function`.
"""

from collections.abc import Collection

MODELS = {  # name: its function of (data), or (data, size)
    "net": "common.models.nets:build_net",
    "mlp": "common.models.nets:build_mlp",
    "lstm": "common.models.nets:build_lstm",
    "gpt": "common.models.gpt:build_gpt",
}
FOLDERS = ("data_dir", "workers", "image_size", "bad_samples")  # also of path/to/file.py:function
DATASETS = {  # name: its function of (options), and the flags that not every dataset uses
    "digits": ("common.data.datasets:digits", ()),
    "mnist": ("common.data.datasets:mnist", ("data_dir", "download")),
    "fashion-mnist": ("common.data.datasets:fashion_mnist", ("data_dir", "download")),
    "cifar10": ("common.data.datasets:cifar10", ("data_dir", "download")),
    "imagefolder": ("common.data.datasets:imagefolder", FOLDERS),
    "sentiment": ("common.data.datasets:sentiment", ()),
    "random": ("common.data.datasets:random_numbers", ()),
    "text": ("common.data.datasets:text", ("data_dir",)),
    "tokens": ("common.data.datasets:tokens", ("data_dir", "vocab_size")),
}
EXTRAS: dict[str, str] = {  # option, or argument of Elastic: what is imported only where it is asked for
    "memory": "common.extras.memory:Memory",  # also for an optimizer that is not torch's own
    "turns": "common.extras.turns:Turns",
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
FUSED = ("sgd", "adam", "adamw")  # each weight's update is its own, as --shard needs


def kind_of(name: str) -> str:
    """A name without its size."""
    kind = name.partition(":")[0]
    return kind if kind in SIZED else name


def flags_of_dataset(name: str) -> tuple[str, ...]:
    """Those of the flags of DATASETS that can take effect with this dataset."""
    if ".py:" in name:
        return FOLDERS
    kind = kind_of(name)
    return DATASETS[kind][1] if kind in DATASETS else ()
