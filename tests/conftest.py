"""What every test may rely on, and what every test is held to."""

import gc
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
# So that bare `pytest` finds common, the tools and, from any folder, the helpers of other tests.
sys.path[:0] = [str(ROOT), *map(str, sorted((ROOT / "tests").glob("[a-z]*/")))]

# Else each process that a test starts compiles common/ anew, 0.1 s, and each worker of xdist all tests.
sys.dont_write_bytecode = False

gc.disable()  # imports make no garbage, and the search for it is a fifth of their time

from common import place  # noqa: E402  (found through the path above; without torch)

# Before anything imports torch. One thread and no GPU: neither would survive the forks of ranks.py.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TESTS_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))  # see tools/gpus.py
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for name in place.MEETING:
    os.environ.pop(name, None)

# A shell starts what it puts into the background deaf to Ctrl-C, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


import pages  # noqa: E402  (found through the path above)
import police  # noqa: E402

TEMPORARY = police.move_in()
(TEMPORARY / "config").mkdir()
os.environ["XDG_CONFIG_HOME"] = f"{TEMPORARY}/config"  # the key of whoever runs the tests is not for them
os.environ["XDG_CACHE_HOME"] = str(TEMPORARY / "cache")  # a person's notes of rehearsals are none of ours


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:
        pages.gather()  # for ranks.py


def pytest_sessionfinish():
    gc.unfreeze()  # at the end triton counts what is left, and complains
    shutil.rmtree(TEMPORARY, ignore_errors=True)


@pytest.fixture(autouse=True)
def away_from_the_checkout(tmp_path, monkeypatch):
    """runs/ is the default folder: whoever forgets --run-dir must not see the runs of a person."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No test leaves a process, a listening socket or a file outside tmp_path."""
    before = police.belongings()
    yield
    left = police.left_since(before)
    assert not left, "\n".join(["this test left behind:", *left])


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """One process with torch imported for all tests that start jobs."""
    from jobs import Jobs

    with Jobs(tmp_path_factory.mktemp("jobs")) as jobs:
        yield jobs


@pytest.fixture(scope="session")
def undisturbed(warm, tmp_path_factory):
    """A run of one process from the first step to the last."""
    from jobs import PACED

    run = tmp_path_factory.mktemp("undisturbed") / "run"
    warm.python("train_ddp.py", *PACED, f"--run-dir={run}", PACE="0").ends_with(0)
    return run


@pytest.fixture
def run(tmp_path):
    """The folder of a run."""
    return tmp_path / "run"


@pytest.fixture
def opts(tmp_path):
    """Those of this run, in the tests of the store."""
    from stores import options

    return options(tmp_path)


@pytest.fixture
def now(monkeypatch):
    """What the clocks say: seconds since something, and by how much the wall clock is ahead."""
    now = SimpleNamespace(seconds=10.0, ahead=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(time, "time", lambda: now.seconds + now.ahead)
    return now


@pytest.fixture
def jobs(warm):
    """What a test starts; no process of it may outlive the test."""
    from jobs import until

    yield warm
    try:
        until(lambda: not warm.alive(), "the last process to end")
    finally:
        until(lambda: not [warm.kill(pid) for pid in warm.alive()], "the end of what was killed")
