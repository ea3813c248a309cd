"""What this machine has, for lease.py: `name: value`, a line each."""

import os
import platform
import subprocess

import torch


def main():
    print("python:", platform.python_version())
    print("torch:", torch.__version__)
    print("cores:", len(os.sched_getaffinity(0)))
    gpu = torch.cuda.is_available()
    print("device:", "cuda:0" if gpu else "cpu", flush=True)
    if gpu:
        print("card:", torch.cuda.get_device_name(0))
        print("nccl:", ".".join(map(str, torch.cuda.nccl.version())))
        print("cuda:", torch.version.cuda, "cudnn", torch.backends.cudnn.version(), flush=True)
        subprocess.run(["nvidia-smi"])


if __name__ == "__main__":
    main()
