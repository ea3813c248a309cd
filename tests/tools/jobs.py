"""Starts training as a person would, watches it from outside, and ends what is left of it; every process
carries a token in its environment, and no other process is ever signalled.
"""

import contextlib
import functools
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from importlib.metadata import version
from pathlib import Path

from police import alive, carries, command, end_with, listeners  # noqa: F401  (command: for tests)

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/tools"
PACED = (
    f"--model={TESTS}/paced.py:net",
    f"--dataset={TESTS}/paced.py:data",
    "--global-batch-size=32",
    "--epochs=2",
    "--audit",
    "--no-tensorboard",
    "--log-every=1",
    "--lr=0.01",
)
STEPS = 22  # of PACED
CLEAN = {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}  # the audit of a run that lost nothing
SHARED_PORT = tuple(map(int, version("torch").split(".")[:2])) < (2, 15)  # plain torchrun: one port, 29500


def until(condition, what, deadline=300):
    """The condition's first true value."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline} s for {what}")
        time.sleep(0.005)
    return value


def ran(*words, cwd=ROOT, timeout=300, **env):
    """What a command did, with what it printed."""
    words = list(map(str, words))
    env = os.environ | env
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def executable(path, text):
    """A program of this text; its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path.parent


def free_port():
    """Below the ports that the kernel hands out by itself: one of those may be another's a moment later."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Jobs:
    """What one test, or one campaign, starts; the end of the `with` leaves no process of it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.token = f"jobs-{uuid.uuid4().hex}"
        self.count = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self.warm = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.alive():
            self.kill(pid)
        if self.warm:
            with self.warm:  # waits, and closes its pipes
                self.warm.kill()  # some process of the test's may hold its stdin open

    def environment(self, **extra):
        from common.place import MEETING

        others = *MEETING, "TORCHELASTIC", "PET_", "PYTEST"
        env = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        env |= {"OMP_NUM_THREADS": "1", "JOBS_TOKEN": self.token, "PYTHONDONTWRITEBYTECODE": "1"}
        return env | extra

    def start(self, *argv, cold=False, program=sys.executable, cwd=None, **env):
        """`torchrun ...` or `SCRIPT ...`, from the warm process or, if `cold`, any program as in a shell."""
        self.count += 1
        cwd = str(cwd or self.folder)
        env = self.environment(**env)
        out = self.folder / f"output-{self.count}"
        argv = [str(a) for a in argv]
        if cold:
            command = ["-m", "torch.distributed.run", *argv[1:]] if argv[0] == "torchrun" else argv
            with open(out, "ab") as file:
                child = subprocess.Popen(
                    [program, *command],
                    env=env,
                    cwd=cwd,
                    stdout=file,
                    stderr=file,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=functools.partial(end_with, os.getpid()),
                )
            return Job(self, child.pid, out, child)
        self._warm_up()
        asked = {"argv": argv, "env": env, "cwd": cwd, "out": str(out)}
        print(json.dumps(asked), file=self.warm.stdin, flush=True)
        return Job(self, int(self.warm.stdout.readline()), out)

    def torchrun(self, nproc, script, *flags, restarts=10, **env):
        if SHARED_PORT:
            env.setdefault("PET_MASTER_PORT", str(free_port()))
        return self.start(
            "torchrun",
            f"--nproc_per_node={nproc}",
            f"--max_restarts={restarts}",
            ROOT / script,
            *flags,
            **env,
        )

    def by_hand(self, size, script, *flags, **env):
        """The ranks, each with the environment that a launcher would set."""
        env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [self.python(script, *flags, **env, RANK=str(rank)) for rank in range(size)]

    def python(self, script, *flags, **how):
        return self.start(ROOT / script, *flags, **how)

    def store(self):
        """(the process of launch/store.py, where it listens)."""
        store = self.python("launch/store.py", "127.0.0.1:0")
        until(lambda: "store on" in store.output, "the store")
        return store, store.output.split("store on ")[1].strip()

    def alive(self):
        """Every living process of ours, the warm one excepted; zombies do not live."""
        return [pid for pid in alive(self.token) if not (self.warm and pid == self.warm.pid)]

    def kill(self, pid, number=signal.SIGKILL):
        """Whether the signal was sent to a living process of ours: its pid may be somebody else's by now."""
        if not carries(pid, self.token):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _warm_up(self):
        if self.warm:
            return
        self.warm = subprocess.Popen(
            [sys.executable, f"{TESTS}/warm_torchrun.py"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment(),
            start_new_session=True,
        )
        self.warm.stdout.readline()


class Job:
    def __init__(self, jobs, pid, out, child=None):
        self.jobs = jobs
        self.pid = pid
        self.out = out
        self.child = child
        self.code = Path(f"{out}.code")

    def poll(self):
        if self.child:
            return self.child.poll()
        text = self.code.read_text() if self.code.exists() else ""
        return int(text) if text else None

    def wait(self, deadline=300):  # longer than ranks wait for one that does not come
        """The exit code; the whole output is in the error if it does not come."""
        try:
            until(lambda: self.poll() is not None, f"the end of {self.pid}", deadline)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None
        return self.poll()

    def ends_with(self, code):
        """Its output, once it has ended with this exit code."""
        assert self.wait() == code, self.output
        return self.output

    def kill(self, number=signal.SIGKILL):
        return self.jobs.kill(self.pid, number)

    @property
    def output(self):
        return self.out.read_text(errors="replace")[-20000:] if self.out.exists() else ""

    @property
    def workers(self):
        """What an agent has started and still lives."""
        return children(self.pid)


def state(pid):
    """One letter, as in ps; X if there is no such process."""
    return _stat(pid)[0]


def listening(pid):
    """The addresses this process listens on, as the kernel writes them."""
    return {place.split(":")[0] for place in listeners(pid).values()}


def children(pid):
    return [
        p
        for p in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if (s := _stat(p))[1] == pid and s[0] not in "ZX"
    ]


def family(pid):
    """A process, and all that it and its children have started; itself first."""
    return [pid, *(one for child in children(pid) for one in family(child))]


def _stat(pid):
    try:
        letter, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
        return letter.decode(), int(parent)
    except (OSError, ValueError):
        return "X", 0


# ---- what a run says of itself --------------------------------------------------------------------
def events(run, name=None):
    paths = sorted(Path(run).glob("ledger*.jsonl"))  # of each machine one
    files = [(path, path.stat()) for path in paths]
    found = _events(*((path, there.st_ino, there.st_size, there.st_mtime_ns) for path, there in files))
    return [e for e in found if name in (None, e.get("event"))]


@functools.lru_cache(1)
def _events(*files):
    """Read once as long as no file changes: who waits asks 200 times a second."""
    found = []
    for path, *_ in files:
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found if len(files) < 2 else sorted(found, key=lambda event: event["t"])


def lives(run):
    return events(run, "life")


def done_by_rank(run, life):
    """{rank: the last step it did in this life, or 0}, from the ends of the audit files."""
    found = {}
    for path in (Path(run) / "audit" / life).glob("*"):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            steps = re.findall(rb'"event": "done", "step": (\d+)', file.read())
        found[int(re.search(r"rank(\d+)", path.name)[1])] = int(steps[-1]) if steps else 0
    return found


def reached(run):
    """The last step done by any rank of the newest life; 0 if none is."""
    newest = [life["life"] for life in lives(run)[-1:]]
    return max([step for life in newest for step in done_by_rank(run, life).values()], default=0)


def wait_for(run, step, life=0, job=None):
    """The newest life (at least number `life`, from 0), once a rank of it has done `step`."""

    def there():
        code = job and job.poll()
        found = lives(run)
        if len(found) > life and reached(run) >= step:
            return found[-1]
        assert code is None, f"the job ended with {code} before step {step}"

    try:
        return until(there, f"step {step} of life {life} in {run}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.output if job else ''}") from None


def kill_at(job, run, step, rank=1, life=0, number=signal.SIGKILL):
    """Kills a rank once one has done `step`, in life number `life` (from 0) at the earliest; that life."""
    found = wait_for(run, step, life, job)
    assert job.jobs.kill(found["pids"][rank], number), f"rank {rank} had gone"
    return found


def audit(run):
    """{"missed", "repeated", "lost", "redone"} as `python -m common.ledger RUN --audit` prints them."""
    from common.extras.audit import audit as count

    return count(Path(run))


def digest(run):
    """The word that `python -m common.checkpoint RUN --digest` ends with."""
    from common.extras.chosen import choose

    return choose(run, "newest")[2].split()[-1]


def rows(run):
    """The lines of its metrics.jsonl."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [row["loss"] for row in rows(run) if "loss" in row]


def steps_on_disk(run):
    """Of its checkpoints, in order; a name may end in .1, .2 ... where a step was saved again."""
    return sorted({int(path.name[5:13]) for path in (Path(run) / "checkpoints").glob("step-*")})


def weights(run):
    """Every tensor of the newest whole checkpoint, by name."""
    from safetensors.torch import load_file

    newest = max((Path(run) / "checkpoints").glob("step-*"))
    found = {}
    for path in newest.glob("*.safetensors"):
        prefix = "optimizer " if path.stem == "optimizer" else ""
        found |= {prefix + name: tensor for name, tensor in load_file(path).items()}
    return found
