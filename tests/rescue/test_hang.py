"""A run that hangs is ended, with the place of each rank; one that waits for a slow rank is not."""
import ctypes
import os
import signal
import threading
import time
from types import SimpleNamespace

from jobs import until
from ranks import fork_ranks

from common.rescue import hang
from common.rescue.hang import Hang


def state_at(step=0):
    return SimpleNamespace(step=step, progress=0)


def alone():
    return SimpleNamespace(rank=0, size=1)


def watched(world, limit, state):
    """(Hang, its reports)"""
    reports = []
    return Hang(state, world, limit, reports.append), reports


def test_a_rank_that_does_not_move_is_told_with_its_stack_and_one_that_moves_is_not():
    state = state_at(7)
    watch, reports = watched(alone(), 1, state)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        state.progress += 1
        time.sleep(0.05)
    assert not reports
    until(lambda: reports, "the report")
    watch.stop()
    assert "no progress for 1 s at step 7" in reports[0] and "test_a_rank_that_does_not_move" in reports[0]


def test_the_limit_follows_the_pace_of_steps_and_is_generous_before_the_second():
    state = state_at()
    watch, _ = watched(alone(), 0, state)
    watch.stop()
    assert watch.limit == hang.OPENING_SECONDS
    state.step = 8
    watch.first = watch.moved - 70, 1
    assert watch.limit == 200
    watch.first = watch.moved - 7, 1
    assert watch.limit == hang.LEAST_LIMIT_SECONDS


def rank_1_is(world, how):
    """What each rank reports, once rank 1 is busy, elsewhere or stopped."""
    state = state_at(3)
    watch, reports = watched(world, 2, state)
    if world.rank == 1 and how == "busy":
        end = time.monotonic() + 6
        while time.monotonic() < end:
            state.progress += 1
            time.sleep(0.05)
        watch.stop()
        world.barrier("waited")
        return reports
    if world.rank == 1 and how == "stopped":
        world.store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return reports
    if how == "busy":
        world.barrier("waited")
    elif world.rank == 1:
        threading.Event().wait(60 if not reports else 0)
    else:
        until(lambda: reports, "the report")
        world.store.add("reported", 1)
        until(lambda: world.store.add("reported", 0) == 2, "the other report")
        if how == "stopped" and world.rank == 0:
            os.kill(int(world.store.get("pid")), signal.SIGCONT)
    watch.stop()
    return reports


def test_a_rank_that_works_while_the_others_wait_is_no_hang():
    assert fork_ranks(3, rank_1_is, "busy") == [[]] * 3


def test_a_stopped_process_is_named_once_apart_from_those_that_wait_for_it():
    reports = [report for reports in fork_ranks(3, rank_1_is, "stopped") for report in reports if report]
    assert len(reports) == 1 and "no progress for 2 s at step 3; rank 0,2: step 3, " in reports[0], reports
    assert "rank 1: gives no sign of life" in reports[0]


def test_ranks_that_are_elsewhere_than_most_are_shown_with_their_stacks():
    here, elsewhere = ["step 3, a.py:1", "stack a\n"], ["step 3, b.py:2", "stack b\n"]
    places = [here, elsewhere, here]
    assert hang.in_words(places) == (
        "rank 0,2: step 3, a.py:1; rank 1: step 3, b.py:2\nrank 1 is here:\nstack b")


def hold_pythons_lock_in_c(world):
    hang.LOCKED_SECONDS = 1
    watched(world, 0.5, state_at())
    ctypes.PyDLL(None).sleep(100)  # PyDLL keeps the lock: no Python thread runs any more


def test_a_lock_held_in_c_ends_the_process_with_its_stacks(capfd):
    assert fork_ranks(1, hold_pythons_lock_in_c, may_die=[0]) == [1]
    assert "hold_pythons_lock_in_c" in capfd.readouterr().err
