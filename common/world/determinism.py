"""What decides the bits beside the options (--virtual-ranks): set once, recorded with the run, compared at
every start.
"""
import os
import platform
import sys

import torch

from common.errors import UserError, say
from common.sampler import hash_seed

FIRM = {"threads": "CPU threads per process", "device": "kind of device", "optimizer": "implementation of the optimizer"}
# other bits are likely then, not certain: said, not refused
SOFT = {"torch": "build of torch", "cpu": "CPU", "gpu": "GPU"}
# choose code as the CPU does
KERNELS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")


def pin(opts):
    """Before the first tensor is computed; plain `python` included, where torchrun sets no thread count."""
    if not opts.virtual_ranks:
        return
    torch.set_num_threads(opts.threads or 1)
    # cuBLAS is deterministic only with a fixed workspace
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # filling what is overwritten anyway costs time only
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False  # it would choose kernels by their speed today


def bit_facts(opts, world):
    """{name: value} for options.json; empty in plain mode, which promises nothing about bits."""
    if not opts.virtual_ranks:
        return {}
    found = {"threads": torch.get_num_threads(), "device": world.device.type, "optimizer": "fused",
             "torch": f"{torch.__version__} {torch.version.git_version} {hash_seed(torch.__config__.show()):08x}",
             "cpu": " ".join([torch.backends.cpu.get_cpu_capability(), _processor(), *(
                 f"{name}={os.environ[name]}" for name in KERNELS if name in os.environ)])}
    if world.device.type == "cuda":
        found["gpu"] = f"{torch.cuda.get_device_name(world.device)} cudnn {torch.backends.cudnn.version()}"
    return found


def bit_differences(was, now):
    """([what must not differ], [what may change the bits]) between two `facts`, in words."""
    return tuple([f"{text} was {was[name]}, now {now.get(name)}" for name, text in names.items()
                  if name in was and was[name] != now.get(name)] for names in (FIRM, SOFT))


def require_same_bits(opts, world):
    """All ranks of this life compute with the same bits, or it is said which do not; call on every rank."""
    mine = bit_facts(opts, world)
    for names in (FIRM, SOFT):
        key = hash_seed(*(mine.get(name) for name in names))
        keys = [int(k) for k in world.all_gather(torch.tensor([key]))]
        odd = [rank for rank, k in enumerate(keys) if k != keys[0]]
        if odd and names is FIRM:
            raise UserError(f"--virtual-ranks: ranks {odd[:8]} differ from rank 0 in {', '.join(FIRM.values())}\n"
                            f"rank {world.rank} has {', '.join(str(mine[name]) for name in FIRM)}; make them equal, "
                            "for example with --device cpu")
        if odd and world.rank in (0, odd[0]):
            say(f"--virtual-ranks: rank {world.rank} has {', '.join(str(mine.get(name)) for name in SOFT)}: ranks differ in these, "
                "so other worlds may give other bits", sys.stderr)


def _processor():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
