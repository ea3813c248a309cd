"""A fire drill: your command runs undisturbed, then again with kills, a stop and another number of processes.

    python launch/drill.py launch/local.sh --audit --max-steps 400 --run-dir runs/drill
    python launch/drill.py --kills 9 torchrun --nproc_per_node=4 my_loop.py      # Elastic(..., audit=True)

The command begins a run of its own, whose folder is not there yet, notes its samples (audit) and completes it
in minutes. The undisturbed run is moved to RUN-undisturbed, the disturbed one is RUN. A kill strikes a random
process at a random moment. Exit code 0: each promise held; 1: one did not hold, or a fault did not strike.
"""

import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from common.errors import UserError, say  # noqa: E402
from common.extras.audit import audit  # noqa: E402
from common.extras.lives import lives_of  # noqa: E402
from common.extras.report import summarize  # noqa: E402
from common.ledger import named  # noqa: E402
from common.options import read_options  # noqa: E402
from launch.command import NPROC, run_tool  # noqa: E402


def main(arguments):
    return run_tool(
        drill,
        __doc__,
        arguments,
        kills=(5, "how many processes are killed (default: 5)"),
        then=(0, "processes after the stop (default: one more)"),
    )


def drill(args):
    """Make both runs and the table; return the exit code."""
    run = complete(args.command)
    calm = run.with_name(f"{run.name}-undisturbed")
    lives = lives_of(run)
    if len(lives) > 1 or lives[0][0]["step"] or calm.exists():
        raise UserError(f"{run} or {calm} was there before the drill\ndelete it, or name another run folder")
    audit(run)  # refuses a run without notes
    run.rename(calm)
    last = 0.9 * named(lives[0], "done")[0]["step"]
    moments = sorted(random.uniform(0, last) for _ in range(args.kills + 1))
    return report(calm, run, disturb(args.command, run, moments, args.then), moments)


@contextmanager
def started(command, **how):
    """Start a process that the drill ends before it ends itself, when it is told to."""
    job = subprocess.Popen(command, **how)
    try:
        yield job
    finally:
        job.terminate()
        job.wait()


def complete(command):
    """Run a command to its end; return the folder of its run, as its last line names it."""
    found = None
    with started(command, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout:
            say(line.rstrip("\n"))
            found = re.fullmatch(r"done at step \d+: (?:.*, )?(.+)\n", line) or found
        job.wait()
    if job.returncode or not found:
        raise UserError(f"the command ended with code {job.returncode}, and completed no run\nsee above")
    return Path(found[1])


def disturb(command, run, moments, then):
    """Run the command with a fault at each of these steps; return when processes were killed.

    A life has one fault at most, after its first step. `moments` keeps those that did not strike.
    """
    stop = moments[len(moments) // 2]
    kills = []
    disturbed = 0  # lives
    code = None
    while code != 0:
        with started(command) as job:
            while job.poll() is None:
                time.sleep(0.01)
                # no life, step or process yet, or no more; no fault is left
                with suppress(UserError, IndexError, ProcessLookupError):
                    lives = lives_of(run)
                    step = named(lives[-1], "first_step", "steps")[-1]["step"]
                    if len(lives) == disturbed or step < moments[0]:
                        continue
                    if moments[0] == stop:
                        job.terminate()
                        number = str(then or lives[-1][0]["world"] + 1)
                        os.environ |= {"NPROC": number, "PET_NPROC_PER_NODE": number}
                        command = re.sub(NPROC, rf"\g<1>{number}", "\0".join(command)).split("\0")
                    else:
                        pids = summarize(run)["now"]["pids"]
                        os.kill(random.choice([*pids.values()]), signal.SIGKILL)
                        kills.append(time.time())
                    disturbed = len(lives)
                    del moments[0]
        code = job.returncode
        if code in range(2, 8):  # another start cannot help
            raise UserError(f"the command ended with code {code}\nsee above; --then N, if devices lack")
    return kills


def report(calm, run, kills, missing):
    """Print the table; return the exit code."""
    from common.extras.chosen import weights_of  # imports torch

    lives = lives_of(run)
    worlds = [life[0]["world"] for life in lives]
    first_steps = [event["t"] for life in lives for event in named(life, "first_step")]
    # none follows a kill after the last step
    seconds = [min((t - kill for t in first_steps if t > kill), default=math.nan) for kill in kills]
    counts = audit(run)
    weights, others = (weights_of(folder, "newest")[0] for folder in (calm, run))
    apart = max((weights[name].double() - others[name].double()).abs().max() for name in weights)
    distance = f"differ by {apart:.1e} or less" if apart else "the same bits as of the undisturbed run"
    say(
        f"lives                     {len(lives)}, of {', '.join(map(str, worlds))} processes\n"
        f"seconds to the next step  {', '.join(f'{second:.1f}' for second in seconds)}\n"
        f"samples                   missed {counts['missed']}, repeated {counts['repeated']}\n"
        f"steps                     lost {counts['lost']}, redone {counts['redone']}\n"
        f"final weights             {distance}"
    )
    options = read_options(run)
    alone = min(worlds) == 1
    broken = {
        f"{len(missing)} faults have not struck: the run is too short": missing,
        "a step has other samples, or no notes of them": {"wrong", "unproven"} & counts.keys(),
        "a finished step is lost": counts["lost"] and not alone,
        "with --virtual-ranks each bit is the same": apart and options["virtual_ranks"],
    }
    for promise in filter(broken.get, broken):
        say(f"broken: {promise}")
    return int(any(broken.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
