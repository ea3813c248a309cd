"""What this machine has, for lease.py: `name: value`, a line each."""

import importlib
import os
import platform
import subprocess
from glob import glob

import torch

MODULES = ("torchvision", "tensorboard", "numpy", "safetensors", "pytest", "xdist")


def asked(*command):
    """What a program says; nothing if it is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def imports(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"import {name}: {type(error).__name__}: {error}")
        return False
    return True


def main():
    print("python:", platform.python_version(), flush=True)
    print("torch:", torch.__version__, flush=True)
    gpu = torch.cuda.is_available()
    device = "cuda:0" if gpu else "cpu"
    print("device:", device)
    print("card:", torch.cuda.get_device_name(0) if gpu else "none")
    print("nccl:", ".".join(map(str, torch.cuda.nccl.version())) if gpu else "none")
    print("driver:", asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none")
    print("cuda:", torch.version.cuda, "cudnn", torch.backends.cudnn.version())
    print("cores:", len(os.sched_getaffinity(0)), flush=True)
    print("memory:", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30, "GiB")
    print("missing:", " ".join(name for name in MODULES if not imports(name)) or "nothing", flush=True)
    print(asked("nvidia-smi"), *glob("/dev/nvidia*"), sep="\n")


if __name__ == "__main__":
    main()
