"""What a training uses of torch's inside, which another torch may name otherwise. No torch at the import.

{where: names}; a name is an attribute there, or one that a function there sets. `a/b`: one of them.
"""

import pkgutil

KNOWN_TO_WORK = "2.11 to 2.15"
TRAINING = {
    "torch": "_foreach_add_ _foreach_copy_ _foreach_div_ _foreach_lerp_",
    "torch:Tensor": "_version",
    "torch.nn:Module": "_modules _buffers _forward_hooks _forward_pre_hooks",
    "torch.nn.parallel:DistributedDataParallel": "_check_reducer_finalized",
    "torch.amp.grad_scaler:GradScaler": "_found_inf_per_device",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__": "_workers",
    "torch.distributed": "_compute_bucket_assignment_by_size",
    "torch.distributed.distributed_c10d": "set_timeout/_set_pg_timeout",
}


def missing(table: dict[str, str]) -> str:
    """Return two lines of an error if this torch lacks a name of the table; else nothing."""
    import torch

    for where, names in table.items():
        try:
            owner = pkgutil.resolve_name(where)
        except (ImportError, AttributeError):
            owner = None
        for name in names.split():
            if not any(has(owner, choice) for choice in name.split("/")):
                return (
                    f"torch {torch.__version__} has no {name} in {where}, which is needed here\n"
                    f"torch {KNOWN_TO_WORK} is known to work"
                )
    return ""


def has(owner: object, name: str) -> bool:
    """Return whether it is an attribute, or is set by this function."""
    set_there = getattr(getattr(owner, "__code__", None), "co_names", ())
    return hasattr(owner, name) or name in getattr(owner, "__annotations__", ()) or name in set_there
