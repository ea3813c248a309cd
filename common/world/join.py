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
from common.options import die_with_the_agent
from common.world.determinism import pin
from common.world.rendezvous import ANSWER, choose_interface, fresh_store, place
from common.world.world import World, _refuse_a_shared_gpu, _too_few

TRIM, MMAP = -1, -3  # mallopt's names for when memory goes back to the kernel, and from which size on at once


def keep_memory():
    """What a step frees stays with the process, for the next step.

    glibc gives freed tensors back to the kernel, which clears each page before the next step may have it: a
    quarter of the time of a ResNet on CPUs.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; other libraries have no such habit, or no such choice
        libc.mallopt(TRIM, 2**31 - 1)
        libc.mallopt(MMAP, 1 << 30) or libc.mallopt(MMAP, 1 << 25)  # the most that older ones take


def allow_open_files(number, whose):
    """Raise this process's limit to what the system allows; a UserError where that is less than `number`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # where none is said to be infinite, and is not
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < number:
        raise UserError(f"{whose} need {number} open files, but this machine allows each of them {hard}\n"
                        "raise the hard limit (ulimit -Hn, LimitNOFILE), or start fewer processes")


def join(opts):
    """The world torchrun (or the hand-set environment, or nothing at all) asks for; call once, on every rank.
    """
    env = os.environ
    gc.freeze()  # what was imported stays: never to be looked at again
    atexit.register(gc.unfreeze)  # but at the end: triton counts what is left, and complains
    gc.enable()
    die_with_the_agent()
    keep_memory()
    rank, size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    allow_open_files(3 * size + 23, f"{size} processes")  # those of rank 0 while it holds the store
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
    # of the start: once training begins the pulse watches
    timeout = timedelta(seconds=4 * opts.hang_timeout or 600)
    life = uuid.uuid4().hex[:12]
    if size > 1:
        choose_interface(env, size, local_size)
        store = store or fresh_store(rank, size)
        _refuse_a_shared_gpu(store, devices[0], local_size)
        _init_process_group(store, rank, size, devices[0], timeout)
        if rank == 0:
            store.set("life", life)
        life = store.get("life").decode()
    world = World(rank, size, local_rank, local_size, node, devices, life, int(env.get("TORCHELASTIC_RESTART_COUNT", 0)), store)
    return world.in_stages(opts.stages or size if opts.script == "mp" else 1, timeout)


def leave(world):
    """The clean end. All is saved and all have met: what goes wrong from here on is no failure.

    Rank 0 holds the store, so it goes last: somebody still asking it would take its end for a death, start
    another life, and on another machine leave an agent waiting for minutes.
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
        raise UserError("--device cuda: torch sees no GPU (CUDA_VISIBLE_DEVICES="
                        f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})\nuse --device cpu, or make a GPU visible")
    if opts.devices:
        devices = tuple(torch.device(name) for name in opts.devices)
        for device in devices:
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise UserError(f"--devices {','.join(opts.devices)}: torch sees {torch.cuda.device_count()} GPUs, "
                                f"so {device} does not exist")
        return devices
    if not count:
        return (torch.device("cpu"),)
    if opts.script != "ddp" and local_size == 1:
        return tuple(torch.device("cuda", i) for i in range(count))
    # one for each, as srun --gpus-per-task leaves them
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return (torch.device("cuda", 0),)
    if local_size > count:
        raise _too_few(local_size, count)
    return (torch.device("cuda", local_rank),)


def _init_process_group(store, rank, size, device, timeout):
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # control traffic never touches the device stream
        # torchrun exports 1: on a dead peer the stuck collective would then "succeed" and a queued optimizer
        # step run on garbage
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout,
                            device_id=device if device.type == "cuda" else None)
