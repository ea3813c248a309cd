"""What ends with a loading process, and what a loading process ends with."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from jobs import ROOT, TESTS, until
from ranks import fork_ranks
from refusals import refusal
from test_data import Noisy, options
from test_rescue import a_run

from common.data import batches
from common.extras.own_data import DatasetSamples
from common.extras.workers import shelter
from common.rescue import Rescue
from common.sampler import ElasticSampler


class Trouble(Noisy):
    """Sample 5 does this."""

    def __init__(self, act):
        super().__init__(12)
        self.act = act

    def __getitem__(self, i):
        if i == 5:
            self.act()
        return torch.zeros(2), 0


def batches_of(act, workers):
    split = DatasetSamples(Trouble(act), options("trouble"), None)
    return batches(split, ElasticSampler(len(split), 2), options("trouble", workers=workers))


def test_a_killed_worker_ends_the_epoch_with_an_error_and_not_with_silence():
    handlers = [signal.getsignal(signal.SIGCHLD)]  # none may raise in the midst of an update
    with refusal("its loading process", code=1):
        for _ in batches_of(lambda: signal.raise_signal(signal.SIGKILL), 2):
            handlers.append(signal.getsignal(signal.SIGCHLD))
    handlers.append(signal.getsignal(signal.SIGCHLD))
    assert len({*handlers}) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_a_worker_alone_is_no_signal_to_its_rank(number, run):
    """A forked process inherits the wake-up pipe of its rank's Rescue: the rank would believe that it was
    asked to stop.
    """

    def live(world):
        _, store = a_run(world, run)
        with Rescue(store) as rescue:
            for _ in batches_of(lambda: signal.raise_signal(number), 1):
                pass
        return rescue.asked

    assert fork_ranks(1, live) == [""]


LEAVING = """
import os, sys
from test_data import *
import multiprocessing
kept = batches(noisy(64), ElasticSampler(64, 2), options("trouble", workers=2))
next(kept)
print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
"""


def test_a_worker_that_begins_after_its_rank_was_killed_ends_at_once():
    """Else it would wait for ever: torch's own watch takes process 1 for its rank."""
    for rank, code in ((os.getpid(), 0), (os.getppid(), 1)):
        worker = multiprocessing.get_context("fork").Process(target=shelter, args=(rank, 0))
        worker.start()
        worker.join()
        assert worker.exitcode == code


@pytest.mark.parametrize(
    "how, code",
    [("sys.exit(3)", 3), ("raise KeyError", 1), ("os._exit(4)", 4), ("os.kill(os.getpid(), 9)", -9)],
)
def test_a_rank_that_leaves_in_mid_epoch_takes_its_workers_along(jobs, tmp_path, how, code):
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING + how)
    path = f"{ROOT}:{TESTS}:{Path(__file__).parent}"
    job = jobs.start(script, cold=code == 3, PYTHONPATH=path)  # an interpreter of its own ends in its own way
    said = job.ends_with(code)
    assert len(said.splitlines()[0].split()) == 2, said
    until(lambda: not jobs.alive(), "the end of its workers")
