"""What --digest-every costs: a sum over every bit of weights and optimizer, as a share of N steps.

    python tests/bench/digest.py --rounds 20
"""
import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.world import fingerprint_of

WIDTHS = {"16.8 M": 2048, "0.3 M": 256}


def seconds(act):
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, width in WIDTHS.items():
        net = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        x = torch.randn(64, width)
        optimizer = torch.optim.Adam(net.parameters())

        def step(net=net, x=x, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        def digest(net=net, optimizer=optimizer):
            fingerprint_of(net.state_dict())
            fingerprint_of({(i, key): value for i, values in enumerate(optimizer.state.values())
                            for key, value in values.items()})

        step(), digest()
        pairs = [(seconds(step), seconds(digest)) for _ in range(given.rounds)]
        one, other = (median(times) for times in zip(*pairs, strict=True))
        print(f"{name} parameters, Adam, batch 64: step {one * 1e3:.2f} ms, digest {other * 1e3:.2f} ms, "
              f"{other / one / given.every:.2%} of the steps at --digest-every {given.every}")


if __name__ == "__main__":
    main()
