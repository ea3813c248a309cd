"""The forked worlds that other tests stand on: what they return, and how they fail."""

import os
import signal
import time

import pytest
import torch
from jobs import Jobs, children, state, until
from ranks import fork_ranks
from stores import child


def test_the_first_rank_to_fail_is_reported_first_with_its_traceback_and_nothing_stays():
    def fail_at_one(world):
        if world.rank == 1:
            raise ValueError("the reason")
        return world.all_sum(torch.ones(1)).item()

    began = time.monotonic()
    before = children(os.getpid())
    with pytest.raises(AssertionError) as error:
        fork_ranks(2, fail_at_one, deadline=600)
    assert str(error.value).startswith("rank 1, exit code 1: Traceback") and "fail_at_one" in str(error.value)
    assert "ValueError: the reason" in str(error.value).partition("rank 0")[0]
    assert time.monotonic() - began < 300 and set(children(os.getpid())) <= set(before)


def test_a_rank_that_hangs_is_killed_at_the_deadline():
    def hang(world):
        while world.rank == 1:
            signal.pause()

    with pytest.raises(AssertionError, match="rank 1: no answer in time, killed"):
        fork_ranks(2, hang, deadline=3)


def test_what_a_test_has_started_ends_with_a_pytest_that_is_killed(tmp_path):
    (tmp_path / "endless.py").write_text("import signal\nsignal.pause()\n")

    def start_and_wait():
        (tmp_path / "pid").write_text(f"{Jobs(tmp_path).start('endless.py').pid} ")
        signal.pause()

    with child(start_and_wait):
        pid = until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the start")
        assert state(int(pid)) not in "ZX"
    until(lambda: state(int(pid)) in "ZX", "its end")
