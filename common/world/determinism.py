"""What decides the bits besides the options (--virtual-ranks): set, recorded, compared at every start."""
import os
import platform
import sys
from typing import Any

import torch

from common.errors import say
from common.options import Options
from common.sampler import hash_seed
from common.world.agreement import first_difference, same_everywhere
from common.world.world import World

MUST_MATCH = {"threads": "CPU threads per process", "device": "kind of device",
              "optimizer": "implementation of the optimizer"}
SHOULD_MATCH = {"torch": "build of torch", "cpu": "CPU", "gpu": "GPU"}  # other bits are likely: a warning
# environment variables that choose code as the CPU, or the GPU, does
KERNELS = {"cpu": ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
           "gpu": ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
                   "CUBLASLT_WORKSPACE_SIZE")}


def pin(opts):
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


def bit_facts(opts: Options, world: World) -> dict[str, Any]:
    """{name: value} for options.json; empty without --virtual-ranks, when bits are not promised."""
    if not opts.virtual_ranks:
        return {}
    given = {kind: [f"{name}={os.environ[name]}" for name in names if name in os.environ]
             for kind, names in KERNELS.items()}
    build = f"{hash_seed(torch.__config__.show()):08x}"
    found = {"threads": torch.get_num_threads(), "device": world.device.type,
             "optimizer": "fused" if opts.torch_optimizer[1].get("fused") else "torch's choice",
             "torch": f"{torch.__version__} {torch.version.git_version} {build}",
             "cpu": " ".join([torch.backends.cpu.get_cpu_capability(), _processor(), *given["cpu"]])}
    if world.device.type == "cuda":
        cudnn = f"cudnn {torch.backends.cudnn.version()}"
        found["gpu"] = " ".join([torch.cuda.get_device_name(world.device), cudnn, *given["gpu"]])
    return found


def bit_differences(was: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(differences to refuse, differences to warn of) between two `bit_facts`, in words."""
    def differences(names):
        return [f"{text} was {was[name]}, now {now.get(name)}" for name, text in names.items()
                if name in was and was[name] != now.get(name)]

    return differences(MUST_MATCH), differences(SHOULD_MATCH)


def require_same_bits(opts: Options, world: World) -> None:
    """Refuses a life whose ranks would compute other bits, or warns; call on every rank."""
    mine = bit_facts(opts, world)
    same_everywhere(world, {text: mine.get(name) for name, text in MUST_MATCH.items()})
    odd = first_difference(world, {text: mine.get(name) for name, text in SHOULD_MATCH.items()})
    if odd and world.rank in (0, odd[0]):
        say(f"--virtual-ranks: {odd[1]}: other worlds may give other bits", sys.stderr)


def _processor():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
