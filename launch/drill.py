"""A fire drill: your command runs undisturbed, then again with kills, a stop and another number of processes.

    python launch/drill.py launch/local.sh --audit --max-steps 400 --run-dir runs/drill
    python launch/drill.py --kills 9 torchrun --nproc_per_node=4 my_loop.py      # Elastic(..., audit=True)

The command begins a run of its own, whose folder is not there yet, notes its samples (audit) and completes it
in minutes. The undisturbed run is moved to RUN-undisturbed, the disturbed one is RUN. A kill strikes a random
process at a random moment. Exit code 0: each promise held; 1: one did not hold, or a fault did not strike.
"""

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from common.errors import UserError, run_command  # noqa: E402
from common.ledger import audit, lives_of, named, summarize  # noqa: E402
from common.options import read_options  # noqa: E402

DONE = re.compile(r"done at step \d+: (?:.*, )?(.+)\n")  # the last line of a run ends with its folder
PROCESSES = re.compile("(--nproc(?:[-_]per[-_]node)?[=\0])([0-9]+)")
FINAL = range(2, 8)  # exit codes after which another start cannot help


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="how many processes are killed (default: 5)")
    parser.add_argument("--then", type=int, metavar="N", help="processes after the stop (default: one more)")
    parser.add_argument("--seed", type=int, default=0, help="decides what is killed when (default: 0)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    if not args.command:
        parser.error("which command?")
    return run_command(lambda: drill(args))


def drill(args: argparse.Namespace) -> int:
    """Both runs and the table; returns the exit code."""
    run = complete(args.command)
    calm = run.with_name(f"{run.name}-undisturbed")
    lives = lives_of(run)
    if len(lives) > 1 or lives[0][0]["step"] or calm.exists():
        raise UserError(f"{run} or {calm} was there before the drill\ndelete it, or name another run folder")
    audit(run)
    run.rename(calm)
    draw = random.Random(args.seed)
    steps = named(lives[0], "done")[0]["step"]
    moments = sorted(draw.uniform(0.0, 0.9 * steps) for _ in range(args.kills + 1))
    target = Target(args.command, run)
    for number, step in enumerate(moments):
        if not target.trains(step):
            break
        if number == args.kills // 2:
            target.stop(args.then)
        else:
            target.kill(draw)
    target.trains(math.inf)
    return report(calm, run, target.kills, len(moments))


def complete(command: list[str]) -> Path:
    """Runs a command to its end; the folder of its run, as its last line names it."""
    found = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout or ():
            print(line, end="", flush=True)
            found = DONE.fullmatch(line) or found
    if job.returncode or not found:
        raise UserError(f"the command ended with code {job.returncode}, and completed no run\nsee above")
    return Path(found[1])


class Target:
    """The command while it is disturbed."""

    def __init__(self, command: list[str], run: Path) -> None:
        self.command = command
        self.run = run
        self.lives = 0  # that were disturbed, or are about to be
        self.kills = list[float]()  # when
        self.job = subprocess.Popen(command)

    def trains(self, step: float) -> bool:
        """Waits until a life that was not disturbed yet has made this step. False: the run is complete.

        A command that has ended otherwise is started again.
        """
        while self.job.poll() != 0:
            code = self.job.returncode
            if code in FINAL:
                raise UserError(f"the command ended with code {code}\nsee above; --then N, if devices lack")
            if code is not None:
                self.job = subprocess.Popen(self.command)
            with suppress(UserError):  # there is no life yet
                lives = lives_of(self.run)
                made = named(lives[-1], "first_step", "steps")
                if len(lives) > self.lives and made and made[-1]["step"] >= step:
                    self.lives = len(lives)
                    return True
            time.sleep(0.01)
        return False

    def kill(self, draw: random.Random) -> None:
        """Kills one of the processes."""
        pids = [*summarize(self.run)["now"]["pids"].values()]
        if pids:  # the run is not complete
            os.kill(draw.choice(pids), signal.SIGKILL)
            self.kills.append(time.time())

    def stop(self, processes: int | None) -> None:
        """Stops the command, as a cluster does; it has another number of processes at its next start."""
        processes = processes or lives_of(self.run)[-1][0]["world"] + 1
        self.job.terminate()
        self.job.wait()
        os.environ |= {"NPROC": str(processes), "PET_NPROC_PER_NODE": str(processes)}
        self.command = PROCESSES.sub(rf"\g<1>{processes}", "\0".join(self.command)).split("\0")


def report(calm: Path, run: Path, kills: list[float], faults: int) -> int:
    """Prints the table; returns the exit code."""
    from common.checkpoint import weights_of  # imports torch

    lives = lives_of(run)
    worlds = [life[0]["world"] for life in lives]
    first_steps = [event["t"] for event in named(chain(*lives), "first_step")]
    # none follows a kill after the last step
    seconds = [min((t for t in first_steps if t > kill), default=math.nan) - kill for kill in kills]
    options = read_options(run)
    counts = audit(run)
    wrong = [*counts.get("wrong", []), *counts.get("unproven", [])]
    # a shard, a stage, or the only process: what it alone has is lost with it
    alone = options["shard"] or min(worlds) == lives[-1][0]["stages"]
    weights, others = (weights_of(folder, "newest")[0] for folder in (calm, run))
    apart = max(float((weights[name].double() - others[name].double()).abs().max()) for name in weights)
    largest = max(float(tensor.double().abs().max()) for tensor in weights.values())
    table = {
        "lives": f"{len(lives)}, of {', '.join(map(str, worlds))} processes",
        "seconds to the next step": ", ".join(f"{second:.1f}" for second in seconds),
        "samples": f"missed {counts['missed']}, repeated {counts['repeated']}",
        "steps": f"lost {counts['lost']}, redone {counts['redone']}",
        "final weights": f"differ by {apart:.1e} or less; the largest is {largest:.1f}"
        if apart
        else "the same bits as of the undisturbed run",
    }
    broken = {
        f"{len(lives) - 1} of {faults} faults struck: the run is too short": len(lives) <= faults,
        f"{len(wrong)} steps have other samples, or no notes of them": wrong,
        f"{counts['lost']} finished steps are lost": counts["lost"] and not alone,
        "with --virtual-ranks each bit is the same": apart and options["virtual_ranks"],
    }
    for name, text in table.items():
        print(f"{name:26}{text}")
    for promise, found in broken.items():
        if found:
            print(f"broken: {promise}")
    return int(any(broken.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
