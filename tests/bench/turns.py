"""Ways that take turns, so that whatever else the machine does hits all of them: read the ratios."""

import argparse
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), f"{ROOT}/tests/tools"]


def arguments(text, **defaults):
    """The flags of the command line, each of its default's type; False stands for one without a value."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        how = {"action": "store_true"} if value is False else {"type": type(value), "default": value}
        parser.add_argument(f"--{name}", **how)
    return parser.parse_args()


def compare(title, ways, rounds, base):
    """Prints what each way costs, by what `base` costs; {name: the seconds of each round}.

    A way is a function that returns its seconds. A first round warms up.
    """
    costs = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 - 2 * (number % 2)]:  # none is always the first
            cost = ways[name]()
            if number:
                costs[name].append(cost)
    for name, seconds in costs.items():
        ms = 1e3 * statistics.median(seconds)
        print(f"{title}: {name} {ms:.2f} ms, {ratio(seconds, costs[base])} {base}", flush=True)
    return costs


def ratio(ours, theirs):
    """The median of each round's ratio, and its quartiles."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios * 2, n=4)
    return f"{middle:.3f} x ({low:.3f} to {high:.3f})"
