"""Which of the GPUs that it sees are a process's own, and how processes on GPUs meet (NCCL)."""

import os

import torch.distributed as dist

from common.device import is_gpu, module_of
from common.errors import UserError


def own_share(seen, opts, place, store):
    """Return the GPUs of this process: those that it sees, less the shares of ranks that see the same ones.

    Equal names may be different GPUs (Slurm's --gpus-per-task), so the ranks of a machine compare uuids.
    """
    sharers = [place.rank]
    if store:
        uuids = str([uuid_of(gpu) for gpu in seen])
        store.set(f"sees/{place.rank}", uuids)
        first = place.rank - place.local_rank
        machine = range(first, first + place.local_size)
        lists = store.multi_get([f"sees/{rank}" for rank in machine])
        sharers = [rank for rank, others in zip(machine, lists, strict=True) if others.decode() == uuids]
    each = len(seen) // len(sharers)
    if not each:
        raise UserError(
            f"{len(sharers)} processes on this machine but {len(seen)} GPUs are visible\n"
            f"start at most {len(seen)} (--nproc_per_node={len(seen)}), or use --device cpu"
        )
    if opts.script == "ddp":
        each = 1
    first = sharers.index(place.rank) * each
    return seen[first : first + each]


def uuid_of(gpu):
    return str(module_of(gpu).get_device_properties(gpu).uuid)


def nccl(store, place, devices):
    """Return the backend of processes on GPUs; its variables are set."""
    ranks = max(store.add(f"gpu/{uuid_of(gpu)}", 1) for gpu in devices if is_gpu(gpu))
    if ranks > 1 and "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ:
        raise UserError(
            f"rank {place.rank}: another rank has this GPU (CUDA_VISIBLE_DEVICES: {place.gpus})\n"
            "start as many processes as GPUs are visible, or use --device cpu"
        )
    for name in (
        # torchrun exports 1: then a collective stuck on a dead peer "succeeds", and a queued optimizer
        # step uses garbage
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        # torch's watchdogs would end this process after an error of CUDA or NCCL, saved or not
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
    ):
        os.environ[name] = "0"
    # control traffic never touches the device stream
    kind = devices[0].type
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
