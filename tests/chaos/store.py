"""Each call of a training that changes a file: killed before, after and in the middle of it, or failed with
each errno; each file damaged in each way. Then a start without all that.

What SQLite does for each release. A row is right if the second start ends the training with the weights and
rows of an undisturbed one and a clean audit, and resumes no earlier than what was told as saved. A start that
is struck or finds damage ends with a code of the project's, and in words. A failing disk may cost rows, with
a warning.
"""

import random
import shutil
import time
from collections import Counter

from jobs import audit, events
from jobs import rows as logged

from tests.chaos.checks import digest

FLAGS = (
    *"--model=mlp --dataset=random:60x5 --global-batch-size=8 --epochs=2 --seed=1 --freeze=fc1".split(),
    *"--save-every=3 --save-seconds=0 --keep=2 --log-every=1 --audit --no-tensorboard --device=cpu".split(),
)
KILLS = ("before", "after", "half")
ERRNOS = "ENOSPC EDQUOT EIO EROFS ESTALE EACCES ENOMEM EMFILE".split()
FAILURES = (*ERRNOS, *(f"{name}!" for name in ERRNOS))
DAMAGES = {
    "bit": lambda data, at, rng: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
    "cut": lambda data, at, rng: data[:at],
    "zeros": lambda data, at, rng: data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :],
    "more": lambda data, at, rng: data + rng.randbytes(200),
    "twice": lambda data, at, rng: data[: data.find(b"\n", at) + 1] * 2 + data[data.find(b"\n", at) + 1 :],
}
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
        if not told or any((run / "audit").rglob("*.jsonl")):
            counts = audit(run)
            assert not counts["missed"] + counts["repeated"], counts
        rows = self.rows_of(run)
        lacks = [row for row in self.rows if row not in rows]
        assert not lacks or told, f"rows are lost: {lacks}"
        assert len(rows) + len(lacks) == len(self.rows), "rows are there twice, or others"
        return code

    def half_way(self):
        """A run that was killed after two thirds of its calls."""
        shutil.rmtree(self.folder / "half", ignore_errors=True)
        return self.train("half", f"before {self.calls * 2 // 3}")[0]

    def damage(self, half, path, how, rng):
        """The start of a run of which a file is damaged: right to the end, or refused in words."""
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(half, run)
        data = (run / path).read_bytes()
        (run / path).write_bytes(DAMAGES[how](data, rng.randrange(len(data)), rng))
        _, job = self.train("run")
        assert job.poll() in (0, 2, 3) and "Traceback" not in job.output, job.output
        if job.poll() == 0:
            assert digest(run) == self.digest, "other weights"
        return job.poll()


def rows(bench, rng, every=1):
    """(name of a row, a function that raises if it is wrong) of one case in so many, in a random order."""
    found = [
        (kind, lambda kind=kind, n=n: bench.strike(f"{kind} {n}"))
        for n in range(1, bench.calls + 1)
        for kind in (*KILLS, *FAILURES)
    ]
    half = bench.half_way()
    for path in sorted(path.relative_to(half) for path in half.rglob("*") if path.is_file()):
        if path.name != "lock" and (half / path).stat().st_size:  # each damage of the lock waits 8 s
            for how in DAMAGES:
                found.append((how, lambda path=path, how=how: bench.damage(half, path, how, rng)))
    rng.shuffle(found)
    return found[::every]


def campaign(jobs, folder, seed=0, seconds=600):
    """Prints a table: what was done, how often, with which exit codes; 1 if a row is wrong."""
    rng = random.Random(seed)
    bench = Bench(jobs, folder)
    print(f"{bench.calls} calls change a file", flush=True)
    codes = Counter()
    wrong = 0
    end = time.monotonic() + seconds
    for name, act in rows(bench, rng):
        if time.monotonic() > end:
            break
        try:
            codes[name, act()] += 1
        except AssertionError as error:
            wrong += 1
            print(f"WRONG {name}: {error}", flush=True)
    for (name, code), count in sorted(codes.items()):
        print(f"{name:10} exit code {code:3}  {count} times, right afterwards")
    print(f"{codes.total() + wrong} cases, {wrong} wrong")
    return int(wrong > 0)
