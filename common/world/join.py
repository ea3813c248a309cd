"""How a process joins the world of this life, and how it leaves it."""
import atexit
import contextlib
import ctypes
import gc
import os
import resource
import sys
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError
from common.options import Options
from common.world.determinism import pin
from common.world.rendezvous import ANSWER, choose_interface, fresh_store, place, while_machines_live
from common.world.world import World, _refuse_a_shared_gpu, _too_few

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt: which freed memory goes back to the kernel


def keep_memory():
    """Keeps freed memory for the next step: the kernel would clear it, a quarter of a ResNet's time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; other libraries do not give memory back, or offer no choice
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        if not libc.mallopt(M_MMAP_THRESHOLD, 1 << 30):
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most that older versions accept


def allow_open_files(number, whose):
    """Raises this process's limit as far as the system allows; UserError if that is less than `number`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system may call its limit infinite and refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < number:
        raise UserError(f"{whose} need {number} open files, but this machine allows each of them {hard}\n"
                        "raise the hard limit (ulimit -Hn, LimitNOFILE), or start fewer processes")


def join(opts: Options) -> World:
    """The world that torchrun or a person describes in the environment; call once, on every rank."""
    env = os.environ
    gc.freeze()  # imported modules stay: the collector need not look at them again
    atexit.register(gc.unfreeze)  # at the end triton counts what is left, and complains
    gc.enable()
    keep_memory()
    rank, size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    allow_open_files(4 * size + 23, f"{size} processes")  # rank 0 holds connections to all
    store = None
    if size == 1 or {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(env):
        local_rank, local_size = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", size))
        node = int(env.get("GROUP_RANK", rank // local_size))
    else:  # by hand
        store = fresh_store(rank, size)
        node, local_rank, local_size = place(store, rank, size)
    devices = _devices(opts, local_rank, local_size)
    if opts.threads:
        torch.set_num_threads(opts.threads)
    pin(opts)
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    # during the start; the watchdog takes over when training begins
    timeout = timedelta(seconds=4 * opts.hang_timeout or 600)
    life = uuid.uuid4().hex[:12]
    if size > 1 and dist.is_initialized():  # by a script of one's own
        raise UserError("torch.distributed is initialised already\n"
                        "leave out init_process_group: the ranks are joined here, and parted at the end")
    if size > 1:
        choose_interface(env, size, local_size)
        with while_machines_live():
            store = store or fresh_store(rank, size)
            _refuse_a_shared_gpu(store, devices[0], local_size)
            _init_process_group(store, rank, size, devices[0], timeout)
            if rank == 0:
                store.set("life", life)
            life = store.get("life").decode()
    restart = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
    left = int(env.get("TORCHELASTIC_MAX_RESTARTS", 0)) - restart if "TORCHELASTIC_RUN_ID" in env else 0
    world = World(rank, size, local_rank, local_size, node, devices, life, restart, store, restarts_left=left)
    return world.in_stages(opts.stages or size if opts.script == "mp" else 1, timeout)


def leave(world: World) -> None:
    """The clean end: all is saved, all ranks have met, and no error is a failure.

    Rank 0 holds the store, so it leaves last: its end would be a death for a rank that still asks the store.
    """
    if world.size > 1:
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + ANSWER.total_seconds()
            world.store.add("left", 1)
            while world.rank == 0 and world.store.add("left", 0) < world.size and time.monotonic() < deadline:
                time.sleep(0.01)
            dist.destroy_process_group()
    sys.stdout.flush()


def _devices(opts, local_rank, local_size):
    """The devices of this process: one per rank, or the list of a script that drives many."""
    count = torch.cuda.device_count() if opts.device != "cpu" else 0
    if opts.device == "cuda" and not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UserError(f"--device cuda: torch sees no GPU (CUDA_VISIBLE_DEVICES={visible})\n"
                        "use --device cpu, or make a GPU visible")
    if opts.devices:
        devices = tuple(torch.device(name) for name in opts.devices)
        for device in devices:
            if device.type == "cuda" and device.index >= torch.cuda.device_count():
                raise UserError(f"--devices {','.join(opts.devices)}: "
                                f"torch sees {torch.cuda.device_count()} GPUs, so {device} does not exist")
        return devices
    if not count:
        return (torch.device("cpu"),)
    if opts.script != "ddp" and local_size == 1:
        return tuple(torch.device("cuda", i) for i in range(count))
    # each process sees one GPU, as with srun --gpus-per-task
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return (torch.device("cuda", 0),)
    if local_size > count:
        raise _too_few(local_size, count)
    return (torch.device("cuda", local_rank),)


def _init_process_group(store, rank, size, device, timeout):
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # control traffic never touches the device stream
        # torchrun exports 1: then a collective stuck on a dead peer "succeeds", and a queued optimizer step
        # uses garbage
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size,
                            timeout=timeout, device_id=device if device.type == "cuda" else None)
