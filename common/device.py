"""A GPU, in one place, of the kind that torch was built for: CUDA's was run, others were not.

A collective whose peer is dead holds up its GPU for ever. Behind it many launches, a copy to memory that is
not pinned, or a kernel's first launch wait in the driver, and with them each call of another thread: nobody
could save what there is (tests/gpu/test_one_gpu.py). So whoever may wait for a dead peer asks an event.
"""

import time
from typing import Any

import torch
from torch import nn

POLL_SECONDS = 2e-5  # between two polls


def is_gpu(device: torch.device) -> bool:
    return device.type != "cpu"


def module_of(device: torch.device) -> Any:
    """Return torch.cuda, torch.xpu and so on, which have the same names."""
    return torch.get_device_module(device)


def gpus() -> tuple[torch.device, ...]:
    """Return all that this process sees."""
    kind = torch.accelerator.current_accelerator()
    count = module_of(kind).device_count() if kind else 0
    return tuple(torch.device(kind.type, i) for i in range(count))


def seed_gpus(number: int) -> None:
    """Seed the generators of all GPUs, if one is in use."""
    kind = torch.accelerator.current_accelerator()
    if kind and module_of(kind).is_initialized():
        module_of(kind).manual_seed_all(number)


def devices_of(net: nn.Module) -> list[torch.device]:
    """Return where its weights are, in their order; several if its author has placed it so."""
    return [*dict.fromkeys(p.device for p in net.parameters())] or [torch.device("cpu")]


def mark(device: torch.device) -> torch.Event | None:
    """Return an event behind all that a GPU was given so far; None for a CPU, which has done it."""
    return module_of(device).current_stream(device).record_event() if is_gpu(device) else None


def wait_by_polling(event: torch.Event | None) -> None:
    """Ask until the event has come: behind a call that waits in the driver other threads' calls wait."""
    while event and not event.query():
        time.sleep(POLL_SECONDS)
