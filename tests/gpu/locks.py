"""Behind a stream that hangs, wherever the main thread stands: can a rescue ask an event and copy a weight?

    python tests/gpu/locks.py [--device cuda:0] [CASE ...]    # about 30 seconds for all

Each case is a process of its own; all run at once. `control` holds Python's lock and must hang.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

if "--child" in sys.argv:  # it takes seconds
    import torch

STANDS = 2.0  # seconds until the main thread stands where it will
SIZE = 1 << 18


def fakes():
    """A CPU has no streams: nothing hangs, and no event comes."""
    event = SimpleNamespace(query=lambda: False, synchronize=lambda: time.sleep(1000))
    return SimpleNamespace(side=contextlib.nullcontext(), hang=lambda: None, mark=lambda: event)


def streams(device):
    torch.cuda.set_device(device)
    other = torch.cuda.Stream()

    def hang():
        """As a collective whose peer is dead, on a stream of its own."""
        with torch.cuda.stream(other):
            torch.cuda._sleep(2**40)
        torch.cuda.current_stream().wait_stream(other)

    side = torch.cuda.stream(torch.cuda.Stream())
    return SimpleNamespace(side=side, hang=hang, mark=lambda: torch.cuda.current_stream().record_event())


def ask(event):
    while not event.query():
        time.sleep(2e-4)


def repeat(function, count):
    for _ in range(count):
        function()


CASES = {  # where the main thread stands; `at` has what it may touch
    "control": lambda at: ctypes.PyDLL(None).sleep(1000),
    "asking": lambda at: ask(at.after),  # as this project does
    "waiting": lambda at: at.after.synchronize(),
    "launches": lambda at: repeat(at.add, 2000),
    "copy": lambda at: at.weight.cpu(),
    "first_launch": lambda at: at.weight.cumsum(0),
}


def child(case, device, patience):
    faulthandler.dump_traceback_later(60, exit=True)  # of the start, the longest part
    at = fakes() if device == "cpu" else streams(device)
    at.weight = torch.ones(SIZE, device=device)
    at.add = lambda: at.weight.add_(1)
    for _ in range(3):  # the kernels of all cases but the last are loaded
        at.add()
        with at.side:
            at.weight.cpu()
    if device != "cpu":
        torch.cuda.synchronize()
    at.hang()
    begun = at.mark()  # before an update, which is behind the dead collective

    def rescue():
        time.sleep(STANDS)
        began = time.monotonic()
        came = begun.query()
        asked = time.monotonic()
        with at.side:
            right = bool((at.weight.cpu() == 4).all())
        print(json.dumps([came, right, asked - began, time.monotonic() - asked]), flush=True)
        os._exit(0)

    threading.Thread(target=rescue, daemon=True).start()
    at.after = at.mark()
    print("ready", flush=True)
    faulthandler.dump_traceback_later(STANDS + patience, exit=True)  # it needs no lock
    CASES[case](at)
    time.sleep(1000)  # it has come through: it is not in the rescue's way


def judge(said, code):
    """What a case has shown."""
    result = said.splitlines()[-1] if said else ""
    if result.startswith("["):
        came, right, asked, copied = json.loads(result)
        wrong = "" if right and not came else f", WRONG: the event came {came}, the weights are right {right}"
        return f"rescued: asked {asked:.4f} s, copied {copied:.4f} s{wrong}"
    if "ready\n" in said and "Timeout" in said:
        return "HANGS: nothing is rescued"
    return f"ended with {code}: {said[-200:]!r}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--patience", type=float, default=12, help="seconds that a rescue has")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("cases", nargs="*", default=[*CASES])
    args = parser.parse_args()
    if args.child:
        return child(args.cases[0], args.device, args.patience)
    command = [sys.executable, __file__, "--child", "--device", args.device, "--patience", str(args.patience)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = {case: subprocess.Popen([*command, case], **pipes) for case in args.cases}
    for case, process in started.items():
        said, _ = process.communicate()
        print(f"{case:12} {judge(said, process.returncode)}", flush=True)


if __name__ == "__main__":
    main()
