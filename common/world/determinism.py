"""What decides the bits besides the options (--virtual-ranks): set, recorded, compared at every start."""

import os

import torch

from common.options import Options
from common.sampler import hash_seed

FACTS = {  # {name in options.json: what it is}
    "threads": "CPU threads per process",
    "device": "kind of device",
    "optimizer": "implementation of the optimizer",
    "build": "build of torch",
    "processor": "CPU or GPU",
}
MUST_MATCH = ("threads", "device", "optimizer")  # where another of the rest may give other bits: a warning


def pin(opts: Options) -> None:
    """Call before the first tensor is computed; plain `python` needs it too, for it sets no thread count."""
    if opts.threads or opts.virtual_ranks:
        torch.set_num_threads(opts.threads or 1)
    if opts.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = not opts.virtual_ranks  # it chooses kernels by their speed today
    if opts.virtual_ranks:
        # cuBLAS is deterministic only with a fixed workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it is overwritten anyway


def bit_facts(opts: Options, device: torch.device) -> dict[str, str | int]:
    """{name: value} for options.json; empty without --virtual-ranks, when bits are not promised."""
    if not opts.virtual_ranks:
        return {}
    processor = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        processor = f"{torch.cuda.get_device_name(device)} cudnn {torch.backends.cudnn.version()}"
    return {
        "threads": torch.get_num_threads(),
        "device": device.type,
        "optimizer": "fused" if opts.torch_optimizer[1].get("fused") else "torch's choice",
        "build": f"{torch.__version__} {hash_seed(torch.__config__.show()):08x}",
        "processor": processor,
    }


def bit_differences(was: dict[str, str | int], now: dict[str, str | int]) -> tuple[list[str], list[str]]:
    """(differences to refuse, differences to warn of) between two lives' `bit_facts`, in words."""
    firm = []
    soft = []
    for name, text in FACTS.items():
        if name in was and was[name] != now.get(name):
            differences = firm if name in MUST_MATCH else soft
            differences.append(f"{text} was {was[name]}, now {now.get(name)}")
    return firm, soft
