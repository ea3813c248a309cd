"""A run that hangs is ended, with the place of each rank; one that waits for a slow rank is not."""

import ctypes
import os
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

from jobs import until
from ranks import fork_ranks

from common.rescue import hang, watch
from common.rescue.lifelines import Lifelines
from common.rescue.watch import Watch


def watched(world, limit):
    """(state, what stops its Watch, the reports)"""
    state = SimpleNamespace(
        progress=SimpleNamespace(step=3), heartbeat=0, opts=SimpleNamespace(hang_timeout=limit)
    )
    reports = []
    ears = Watch(state, world)
    ending = threading.Lock()

    def stand_by():
        while ears.is_late(ending):
            ending.acquire()
            reports.append(ears.hang.report())

    thread = threading.Thread(target=stand_by, daemon=True)
    thread.start()

    return state, lambda: ears.stop(thread), reports


def has_no_room_for_a_thread(world):
    """The seconds that faulthandler was asked for, though it never had a thread."""
    armed = []

    def no_room(seconds, **_):
        armed.append(seconds)
        raise RuntimeError("unable to start watchdog thread")

    watch.faulthandler = SimpleNamespace(
        dump_traceback_later=no_room, cancel_dump_traceback_later=lambda: None
    )
    _, stop, reports = watched(world, 0.5)
    until(lambda: reports, "the report of a hang")
    stop()
    return min(armed)


def test_the_watch_needs_no_thread_of_faulthandler_whose_clock_ends_no_job_that_was_suspended_for_hours():
    """It runs on, and its thread is the first to run when the job is continued: all would end unsaved."""
    assert fork_ranks(1, has_no_room_for_a_thread)[0] >= 24 * 3600


def stop_while_the_thread_wakes(world):
    watch.LOOK_SECONDS = 0.01
    _, stop, _ = watched(world, 600)
    give_back = signal.set_wakeup_fd
    signal.set_wakeup_fd = lambda fd: (time.sleep(0.3), give_back(fd))
    stop()


def test_a_thread_that_wakes_at_the_clean_end_leaves_the_pipe_of_the_signals_open_until_all_is_over():
    fork_ranks(1, stop_while_the_thread_wakes)


def wait_for_rank_1(world):
    """Reports of each rank while rank 1 works, for three times the limit."""
    state, stop, reports = watched(world, 2)
    end = time.monotonic() + 6
    while world.rank == 1 and time.monotonic() < end:
        state.heartbeat += 1
        time.sleep(0.05)
    world.barrier()
    stop()
    return reports


def test_a_rank_that_works_while_the_others_wait_is_no_hang():
    assert fork_ranks(3, wait_for_rank_1) == [[]] * 3


def stop_rank_1(world):
    hang.PLACES_SECONDS = 1
    _, _, reports = watched(world, 2)
    if world.rank == 1:
        world.store.set("pid", str(os.getpid()))
        signal.raise_signal(signal.SIGSTOP)
        return ""
    until(lambda: reports, "the report")
    world.store.add("reported", 1)
    until(lambda: world.store.add("reported", 0) == 2, "the other report")
    if world.rank == 0:
        os.kill(int(world.store.get("pid")), signal.SIGCONT)
    return reports[0]


def test_a_stopped_process_is_named_apart_from_those_that_wait_for_it(capfd):
    first, _, other = fork_ranks(3, stop_rank_1)
    assert re.fullmatch(r"no progress for 2 s at step 3; no sign of life \(.*\) of ranks \[1\]", first), first
    assert other == "no progress for 2 s at step 3"
    assert "rank 2 is here:" in capfd.readouterr().err


def hold_pythons_lock_in_c(world):
    watch.LOCKED_SECONDS = 1
    watched(world, 0.5)
    ctypes.PyDLL(None).sleep(100)  # PyDLL keeps the lock: no Python thread runs any more


def test_a_lock_held_in_c_ends_the_process_with_its_stacks(capfd):
    assert fork_ranks(1, hold_pythons_lock_in_c, may_die=[0]) == [1]
    assert "hold_pythons_lock_in_c" in capfd.readouterr().err


def test_a_message_that_comes_in_two_pieces_is_heard_once_it_is_whole():
    """Half of one would end the thread that listens, and nothing would end a hang."""
    lines = Lifelines(SimpleNamespace(rank=0, store=None), [{"machine": "boot"}])
    ours, theirs = socket.socketpair()
    with ours:
        for piece, messages in (
            (b"mov", []),
            (b"ed\ngoes na\xc3", ["moved"]),  # in the middle of a letter
            (b"\xafve\n", ["goes na\u00efve"]),
        ):
            theirs.send(piece)
            assert lines.hear(ours) == messages
        theirs.close()
        assert lines.hear(ours) is None, "its end"
