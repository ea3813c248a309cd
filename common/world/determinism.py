"""What decides the bits besides the options (--virtual-ranks): set, recorded, compared at every start."""
import os
import sys
from typing import Protocol

import torch

from common.errors import UserError, say
from common.options import Options
from common.sampler import hash_seed

FACTS = {  # {name in options.json: what it is}
    "threads": "CPU threads per process", "device": "kind of device",
    "optimizer": "implementation of the optimizer", "torch": "build of torch", "cpu": "CPU", "gpu": "GPU"}
MUST_MATCH = ("threads", "device", "optimizer")  # where another of the rest may give other bits: a warning


class Ranks(Protocol):
    """What is asked of a World."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def differences(self, facts: dict[str, str | int]) -> list[tuple[int, str, str, str]]: ...


def pin(opts: Options) -> None:
    """Call before the first tensor is computed; plain `python` needs it too, for it sets no thread count."""
    if opts.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = not opts.virtual_ranks  # it chooses kernels by their speed today
    if not opts.virtual_ranks:
        return
    torch.set_num_threads(opts.threads or 1)
    # cuBLAS is deterministic only with a fixed workspace
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is overwritten anyway


def bit_facts(opts: Options, world: Ranks) -> dict[str, str | int]:
    """{name: value} for options.json; empty without --virtual-ranks, when bits are not promised."""
    if not opts.virtual_ranks:
        return {}
    facts = {
        "threads": torch.get_num_threads(),
        "device": world.device.type,
        "optimizer": "fused" if opts.torch_optimizer[1].get("fused") else "torch's choice",
        "torch": f"{torch.__version__} {hash_seed(torch.__config__.show()):08x}",
        "cpu": torch.backends.cpu.get_cpu_capability()}
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        facts["gpu"] = f"{name} cudnn {torch.backends.cudnn.version()}"
    return facts


def bit_differences(was: dict[str, str | int], now: dict[str, str | int]) -> tuple[list[str], list[str]]:
    """(differences to refuse, differences to warn of) between two `bit_facts`, in words."""
    firm = []
    soft = []
    for name, text in FACTS.items():
        if name in was and was[name] != now.get(name):
            differences = firm if name in MUST_MATCH else soft
            differences.append(f"{text} was {was[name]}, now {now.get(name)}")
    return firm, soft


def require_same_bits(opts: Options, world: Ranks) -> None:
    """Refuses a life whose ranks would compute other bits, or warns; call on every rank."""
    for rank, name, first, value in world.differences(bit_facts(opts, world)):
        words = f"rank 0 has {FACTS[name]} {first}, rank {rank} has {FACTS[name]} {value}"
        if name in MUST_MATCH:
            raise UserError(f"--virtual-ranks: the ranks compute other bits: {words}\n"
                            "give every node the same kind of device and the same --threads")
        if world.rank in (0, rank):
            say(f"--virtual-ranks: {words}: other worlds may give other bits", sys.stderr)
