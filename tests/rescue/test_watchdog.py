import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

from ranks import fork_ranks

from common.rescue import watchdog
from common.rescue.watchdog import Watchdog


def state_at(step=0):
    return SimpleNamespace(step=step, progress=0, own=SimpleNamespace(seconds=0.0))


def alone():
    return SimpleNamespace(rank=0, size=1, local_rank=0)


def test_a_rank_that_does_not_move_is_named_with_its_stack_and_one_that_moves_is_not():
    state = state_at(7)
    found = Watchdog(state, alone(), 1, print)
    try:
        deadline = time.monotonic() + 20
        while not found.beat() and time.monotonic() < deadline:
            if time.monotonic() < deadline - 18.5:
                state.progress += 1  # moving: not a word, although the limit is over
            time.sleep(0.05)
        word = found.report()
        assert "rank 0: no progress" in word and "step 7" in word and "test_a_rank_that_does_not_move" in word
    finally:
        found.stop()


def test_the_limit_is_a_minute_or_twenty_median_steps_and_generous_before_the_first_step():
    state = state_at()
    found = Watchdog(state, alone(), 0, print)
    try:
        assert found.limit == watchdog.OPENING_SECONDS
        for k in range(1, 9):
            state.progress = state.step = k
            found.beat()
            found.steps[-1] = (10.0 * k, k)  # ten seconds a step
        assert found.limit == 200
        found.steps = [(0.1 * k, k) for k in range(9)]
        assert found.limit == 60
    finally:
        found.stop()


def test_seconds_in_which_this_process_stood_still_are_no_hang(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    found = Watchdog(state_at(3), alone(), 5, print)
    try:
        for seconds, hangs in ((1, False), (600, False), (1, False), (1, False), (1, True)):
            now[0] += seconds
            assert found.beat() is hangs
    finally:
        found.stop()


class Client:
    """A store's client that counts questions."""

    def __init__(self, told):
        self.told, self.asked = told, 0

    def check(self, names):
        self.asked += 1
        return set(names) <= self.told.keys()

    def multi_get(self, names):
        self.asked += 1
        return [self.told[name] for name in names]


def test_the_places_of_a_thousand_ranks_are_two_questions_to_the_store():
    found = Watchdog(state_at(3), alone(), 5, print)
    found.world = SimpleNamespace(rank=0, size=1024)
    client = Client({f"pulse/{rank}": b"3 1 0.0 file.py:1 7 host" for rank in range(1024)})
    try:
        found._read_all(client)
        assert client.asked == 2 and len(found.views) == 1024
    finally:
        found.stop()


def hold_a_lock_in_c(world):
    """No Python of this process runs any more."""
    import ctypes
    import tempfile
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(errors.fileno(), 2)
            sys.stderr = os.fdopen(2, "w")
            watchdog.LOCKED_LIMITS, found = 1, Watchdog(state_at(3), world, 1, print)
            found.beat()
            ctypes.PyDLL(None).sleep(100)  # PyDLL keeps the GIL
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        errors.seek(0)
        return code, errors.read().decode()


def test_a_lock_held_in_c_ends_the_process_with_its_stacks():
    ((code, text),) = fork_ranks(1, hold_a_lock_in_c)
    assert code == -signal.SIGABRT and "hold_a_lock_in_c" in text


def one_is_stopped(world):
    """Rank 2 wakes the stopped one at the end, so that every rank answers."""
    if world.rank == 1:
        world.store.set("pid", str(os.getpid()))
        found = Watchdog(state_at(4), world, 60, print)
        found.beat()
        world.store.get("go")
        threading.Event().wait(1.5)  # it has told its place at least once
        os.kill(os.getpid(), signal.SIGSTOP)
        found.stop()
        return "rank 1: step 4, gives no sign of life for 9 s"
    found = Watchdog(state_at(4), world, 16, print)
    world.store.set("go", "1")
    deadline, word = time.monotonic() + 90, ""
    while "gives no sign of life" not in word and time.monotonic() < deadline:
        time.sleep(0.1)
        found.beat()
        word = found.places
    if world.rank == 2:
        world.store.get("seen")
        os.kill(int(world.store.get("pid")), signal.SIGCONT)
        world.store.set("woken", "1")
    else:
        world.store.set("seen", "1")
        world.store.get("woken")  # its own signs of life go on until rank 2 has seen enough
    found.stop()
    return word


def test_a_stopped_process_is_told_apart_from_those_that_wait_for_it():
    for word in fork_ranks(3, one_is_stopped):
        silent = [part for part in word.split("; ") if "gives no sign of life" in part]
        assert len(silent) == 1 and silent[0].startswith("rank 1: step 4"), word


def name_the_slow(world):
    said, state = [], state_at()
    found = Watchdog(state, world, 60, lambda rank, text: said.append((rank, text)))
    found.host = f"host-{world.rank}"
    deadline = time.monotonic() + 90
    while not (said if world.rank == 0 else world.store.check(["named"])) and time.monotonic() < deadline:
        state.step, state.progress = state.step + 1, state.progress + 1
        state.own.seconds += 0.3 if world.rank == 2 else 0.03
        time.sleep(0.05)
    if world.rank == 0:
        world.store.set("named", "1")
    found.stop()
    return said


def test_a_slow_rank_is_named_as_a_straggler_and_lives():
    said, *others = fork_ranks(3, name_the_slow)
    assert said == [(2, "rank 2 (host-2) is a straggler: 300 ms of own work a step, 30 ms on the others")]
    assert others == [[], []]
