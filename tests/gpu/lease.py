"""All that one GPU can show in ten minutes. Nothing is installed; without a GPU it is a dry run.

    bash tests/gpu/lease.sh FOLDER                # every part, 570 seconds at most
    bash tests/gpu/lease.sh FOLDER saves bench    # these parts alone
    PYTHON=/path/to/python bash tests/gpu/lease.sh FOLDER

A part that fails, or is late, stops no other. FOLDER/figures.txt has all that they print, FOLDER/summary.txt
is short enough for a note, FOLDER/figures.json is for programs. All three are complete after each part.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(f"{ROOT}/tests/tools")

from police import alive  # noqa: E402

SECONDS = 570
GRACE = 10  # seconds between Ctrl-C and SIGKILL for a part that is late
TAIL = 20  # lines of a part that did not pass
FACTS = r"(?P<name>[a-z]+): ?(?P<value>.*)"
BENCH = r"(?P<net>\S+): (?P<way>\S+) (?P<ms>[\d.]+) ms, (?P<ratio>[\d.]+) x .* (?P<other>\S+)$"
TESTS = r"=* ?((?P<failed>\d+) failed, )?(?P<passed>\d+) passed(, (?P<skipped>\d+) skipped)?.* in .*"
SHOWN = ("card", "torch", "nccl", "python", "cores")
DRY = "tests/bench/gpu.py --device cpu --rounds 1 --steps 1"


class Part(NamedTuple):
    """A part has passed if its exit code is 0 and it has printed a figure: tests may all be skipped."""

    name: str
    seconds: float  # at most
    figure: str  # a pattern: the lines with figures
    command: str
    dry: str  # the command where there is no GPU


PARTS = (
    Part("facts", 90, FACTS, "tests/gpu/facts.py", "tests/gpu/facts.py"),
    Part(
        "tests",
        260,
        TESTS,
        "-m pytest tests/gpu -vv -n 8 --dist worksteal -rs --tb=short --durations=5",
        "-m pytest tests/gpu/test_one_gpu.py -vv -n 1 -rs --tb=short -k averages",
    ),
    Part("bench", 110, BENCH, "tests/bench/gpu.py --nets gpt:medium,net", f"{DRY} --nets net"),
    Part("pictures", 90, BENCH, "tests/bench/gpu.py --nets resnet50", f"{DRY} --nets resnet18"),
    Part(
        "saves",
        60,
        BENCH,
        "tests/bench/checkpoint.py --device cuda:0 --mb 1000 --rounds 2",
        "tests/bench/checkpoint.py --mb 1 --rounds 1",
    ),
    Part(
        "compile",
        110,
        BENCH,
        "tests/bench/gpu.py --compile --nets gpt:medium --rounds 2",
        f"{DRY} --compile --nets net",
    ),
)


class Lease:
    """Runs parts one after the other, and writes down what each has shown."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.end = time.monotonic() + SECONDS
        self.done = []  # a dict for each part
        self.summary = []  # lines
        self.texts = self.folder / "figures.txt"
        self.texts.write_text("")

    @property
    def facts(self):
        """{name: value} of the first part; nothing if it has failed."""
        return {row["name"]: row["value"] for row in self.done[0]["figures"]} if self.done else {}

    @property
    def gpu(self):
        return self.facts["device"] != "cpu" if "device" in self.facts else bool(shutil.which("nvidia-smi"))

    def run(self, part):
        most = min(part.seconds, self.end - time.monotonic() - 2 * GRACE)
        began = time.monotonic()
        text = ""
        found = []
        if most < min(part.seconds, GRACE):
            outcome = "skipped: no time left"
        else:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                outcome, text = self._start(part, most, folder)
            found = [match for match in map(re.compile(part.figure).match, text.splitlines()) if match]
            if outcome == "passed" and not found:
                outcome = "failed, no figure"
        line = f"{part.name:10} {outcome}, {time.monotonic() - began:.1f} s"
        tail = text.splitlines()[-TAIL:] if outcome.startswith(("late", "failed")) else []
        self.summary += [line, *(f"    {match.string[:150]}" for match in found)]
        self.summary += [f"  > {line[:150]}" for line in tail]
        figures = [match.groupdict(default="") for match in found]
        self.done.append({"part": part.name, "outcome": outcome, "figures": figures})
        self._write()
        print(line, flush=True)

    def _start(self, part, most, folder):
        """(outcome, all that it printed); no process of it lives on."""
        token = f"lease-{uuid.uuid4().hex}"
        env = os.environ | {"LEASE_PART": token, "PYTHONUNBUFFERED": "1", "TMPDIR": folder}
        env["PYTEST_DEBUG_TEMPROOT"] = folder
        if self.gpu:
            env.setdefault("TESTS_GPUS", "all")
        else:
            env |= {"TESTS_GPUS": "fake", "TORCH_COMPILE_DISABLE": "1"}
        command = part.command if self.gpu else part.dry
        words = [sys.executable, *command.split()]
        with open(self.texts, "a") as file:
            print(f"\n=== {part.name}: {command}", file=file, flush=True)
            began = file.tell()
            pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            child = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **pipes)
            try:
                code = child.wait(most)
                outcome = f"failed, code {code}" if code else "passed"
            except subprocess.TimeoutExpired:
                outcome = "late"
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, signal.SIGINT)  # pytest then says what it has seen
                    child.wait(GRACE)
            finally:
                end_all_with(token)
        return outcome, self.texts.read_bytes()[began:].decode(errors="replace")

    def _write(self):
        told = {name: self.facts.get(name, "?") for name in SHOWN}
        (self.folder / "figures.json").write_text(json.dumps(told | {"parts": self.done}, indent=1) + "\n")
        first = " | ".join(f"{name} {value}" for name, value in told.items())
        (self.folder / "summary.txt").write_text("\n".join([first, *self.summary]) + "\n")


def end_all_with(token):
    """Kills the processes that carry this in their environment; a driver may hold one for some seconds."""
    end = time.monotonic() + GRACE
    while (pids := alive(token)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main(folder, *names):
    known = [part.name for part in PARTS]
    if unknown := set(names) - set(known):
        sys.exit(f"no part {' '.join(sorted(unknown))}\nparts: {' '.join(known)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a part's processes, too
    lease = Lease(folder)
    for part in PARTS:
        if part.name == "facts" or part.name in (names or known):  # the others ask what is there
            lease.run(part)
    print(f"\n{(lease.folder / 'summary.txt').read_text()}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
