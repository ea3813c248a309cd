"""Each call of a training that changes a file: killed before, after and in the middle of it, or failed with
each errno. Then a start without all that.

What SQLite does for each release. A row is right if the second start ends the training with the weights and
rows of an undisturbed one and a clean audit, and resumes no earlier than what was told as saved. A start that
is struck ends with a code of the project's, and in words. A failing disk may cost rows, with
a warning.
"""

import random
import shutil
import time
from collections import Counter

from jobs import audit, digest, events
from jobs import rows as logged

FLAGS = (
    *"--model=mlp --dataset=random:60x5 --global-batch-size=8 --epochs=2 --seed=1 --freeze=fc1".split(),
    *"--save-every=3 --save-seconds=0 --keep=2 --log-every=1 --audit --no-tensorboard --device=cpu".split(),
)
KILLS = ("before", "after", "half")
ERRNOS = "ENOSPC EDQUOT EIO EROFS ESTALE EACCES ENOMEM EMFILE".split()
FAILURES = (*ERRNOS, *(f"{name}!" for name in ERRNOS))
IN_WORDS = (1, 2, 3, 4)  # exit codes of a start that was struck


class Bench:
    """Trainings of one kind in a folder, and what an undisturbed one has left."""

    def __init__(self, jobs, folder):
        self.jobs = jobs
        self.folder = folder
        self.count = folder / "calls"
        golden, _ = self.train("golden", CALLS_COUNT=str(self.count))
        self.calls = int(self.count.read_text())
        self.digest = digest(golden)
        self.rows = self.rows_of(golden)

    def train(self, name, strike="none 0", **env):
        """(its folder, the job, which has ended)."""
        run = self.folder / name
        env |= {"CALLS_RUN": str(run), "CALLS_STRIKE": strike}
        job = self.jobs.python("tests/chaos/calls.py", *FLAGS, f"--run-dir={run}", **env)
        job.wait()
        return run, job

    def rows_of(self, run):
        """Those of metrics.jsonl, without what a clock says."""
        return [row | {"time": 0} for row in logged(run)]

    def strike(self, strike):
        """A training that is struck, and the start after it; AssertionError with what is wrong."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        run, job = self.train("run", strike)
        code = job.poll()
        is_told = code in IN_WORDS and "Traceback" not in job.output
        assert code == 0 or (code == -9 if strike.split()[0] in KILLS else is_told), job.output
        saved = [event["step"] for event in events(run, "save")]
        lives = len(events(run, "life"))
        _, again = self.train("run")
        assert again.poll() == 0, again.output
        began = [event["step"] for event in events(run, "life")[lives:]]
        assert not began or began[0] >= max(saved, default=0), f"{saved} saved, resumed at {began}"
        assert digest(run) == self.digest, "other weights"
        told = "continues without these lines" in job.output
        if not told:  # else lines that the audit needs may be among them
            counts = audit(run)
            assert not counts["missed"] + counts["repeated"], counts
        rows = self.rows_of(run)
        lacks = [row for row in self.rows if row not in rows]
        assert not lacks or told, f"rows are lost: {lacks}"
        assert len(rows) + len(lacks) == len(self.rows), "rows are there twice, or others"
        return code


def strikes(bench, rng):
    """All kinds at all calls, in a random order."""
    found = [f"{kind} {n}" for n in range(1, bench.calls + 1) for kind in (*KILLS, *FAILURES)]
    rng.shuffle(found)
    return found


def campaign(jobs, folder, seed=0, seconds=600):
    """Prints a table: what was done, how often, with which exit codes; 1 if a row is wrong."""
    bench = Bench(jobs, folder)
    print(f"{bench.calls} calls change a file", flush=True)
    codes = Counter()
    wrong = 0
    end = time.monotonic() + seconds
    for strike in strikes(bench, random.Random(seed)):
        if time.monotonic() > end:
            break
        try:
            codes[strike.split()[0], bench.strike(strike)] += 1
        except AssertionError as error:
            wrong += 1
            print(f"WRONG {strike}: {error}", flush=True)
    for (name, code), count in sorted(codes.items()):
        print(f"{name:10} exit code {code:3}  {count} times, right afterwards")
    print(f"{codes.total() + wrong} cases, {wrong} wrong")
    return int(wrong > 0)
