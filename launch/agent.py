"""torch's elastic agent, in a process of its own: it meets the other machines; the launcher has the workers.

Private names of torch that are used or replaced: SubprocessContext and its handlers, LocalElasticAgent,
dynamic_rendezvous' _delay, _BackendRendezvousStateHolder, _RendezvousExitOp, _op_executor, _stop_heartbeats,
_state_holder, _store, _close; the agent's _rendezvous, _monitor_workers and _exit_barrier; c10's
FLAGS_caffe2_log_level.
"""
import contextlib
import ctypes
import json
import logging
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import DistNetworkError
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.launcher import api as launcher_api
from torch.distributed.run import main as torchrun
from workers import FINAL, MESSAGE_BYTES, STOP, STOPPED, die_with

from common.options.environment import flag_in

ANSWER = timedelta(seconds=10)  # a machine that has come to the rendezvous says what it is within
AWAY = 3  # seconds; a machine that leaves to meet again is in no list for a moment
NO_STORE = (RendezvousConnectionError, DistNetworkError)


class Worker:
    """What torch wants to know of a process."""

    pid = returncode = None

    def __init__(self):
        self.proc = self  # a handler has a process: here they are one

    def poll(self):
        return self.returncode


class Life(SubprocessContext):
    """The workers of one life on this machine, which the launcher forks, signals and waits for."""

    line = None

    def _start(self):
        self.tell("life")
        for path in self.starting():  # a rank that was killed
            path.unlink()
        self.subprocess_handlers = {place: Worker() for place in range(self.nprocs)}
        for place in self.subprocess_handlers:
            words = self.entrypoint, *map(str, self.args[place])
            if self._numa_options:
                from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as with_numa
                words = with_numa(words, device_index=place, numa_options=self._numa_options)
            self.tell("start", place, words, self.envs[place], (self.stdouts[place], self.stderrs[place]))
        while not all(self.pids().values()):
            self.listen()

    def _poll(self):
        self.listen(wait=False)
        return super()._poll()

    def _close(self, death_sig, timeout=30):
        self.tell("end", death_sig)
        while any(worker.pid and worker.returncode is None for worker in self.subprocess_handlers.values()):
            self.listen()

    def starting(self):
        """The notes of ranks that may still wait for others; see `begin_life`."""
        return [*Path(self.envs[0]["TORCHELASTIC_ERROR_FILE"]).parents[2].glob("start-*")]

    def tell(self, *words):
        self.line.send(json.dumps(words).encode())

    def listen(self, wait=True):
        self.line.setblocking(wait)
        with contextlib.suppress(BlockingIOError):
            while True:
                what, *words = json.loads(self.line.recv(MESSAGE_BYTES))
                if what == "leave":
                    raise SignalException("a signal", signal.Signals(words[0]))
                name = {"began": "pid", "ended": "returncode"}[what]
                setattr(self.subprocess_handlers[words[0]], name, words[1])
                if wait:
                    return


class Agent(launcher_api.LocalElasticAgent):
    """Does without a machine that dies as others meet or end, and says that it leaves."""

    connected = False  # to the store

    def _rendezvous(self, group):
        """Once more without a machine that came and died: torch's agents would all give up."""
        Agent.connected, self.ended = True, False
        if not self.meets_others:
            return super()._rendezvous(group)
        store = self._rdzv_handler._store
        patience = store.timeout
        while True:
            store.set_timeout(ANSWER)
            try:
                super()._rendezvous(group)
                self.round, self.whole = self.state.round, time.monotonic()
                return
            except DistNetworkError:
                raise
            except RendezvousTimeoutError:
                if not self.state.complete:  # else others train, and need not have had room
                    raise
            except RuntimeError:  # a time-out
                print("torchrun: a machine came and does not answer, meeting again", file=sys.stderr)
            finally:
                store.set_timeout(patience)

    def _monitor_workers(self, group):
        """Ranks that start would wait for those of a dead machine; later they notice by themselves."""
        result = super()._monitor_workers(group)
        if not self.meets_others:
            return result
        apart = self.state.round != self.round  # no heartbeats came: others may meet without us
        fewer = apart or len(self.state.participants) < group.group_world_size
        if not fewer:
            self.whole = time.monotonic()
        if result.state == WorkerState.SUCCEEDED:
            alone = time.monotonic() - self.whole > AWAY
            return result if alone or self.all_ended(group) else RunResult(WorkerState.HEALTHY)
        if apart or fewer and self._pcontext.starting():
            why = "a machine was cut off" if apart else "a machine has gone before all could train"
            print(f"torchrun: {why}, meeting again", file=sys.stderr)
            self._restart_workers(group)
            return RunResult(WorkerState.HEALTHY)
        return result

    def all_ended(self, group):
        """Whether the workers of all machines have ended well."""
        try:
            if not self.ended:
                self.ended = True
                if group.store.add("ended", 1) == group.group_world_size:
                    group.store.set("all ended", "1")
            return group.store.check(["all ended"])
        except RuntimeError:  # the machine with the store has left
            return True

    def _exit_barrier(self):
        """torch waits five minutes for a dead machine, and does not see one that must train again."""
        if not self.meets_others:
            super()._exit_barrier()

    @property
    def meets_others(self):
        dynamic = isinstance(self._rdzv_handler, dynamic_rendezvous.DynamicRendezvousHandler)
        return dynamic and self._rdzv_handler.settings.max_nodes > 1

    @property
    def state(self):
        return self._rdzv_handler._state_holder.state

    def run(self, role="default"):
        try:
            if result := super().run(role):
                return result
            print("torchrun: the job is over, it has not needed this machine", file=sys.stderr)
            return RunResult(WorkerState.SUCCEEDED)
        except Exception as error:
            if not isinstance(error, NO_STORE):
                with contextlib.suppress(Exception):  # another kind of rendezvous, or it does not answer
                    self._rdzv_handler._stop_heartbeats()
                    leave = dynamic_rendezvous._RendezvousExitOp()
                    self._rdzv_handler._op_executor.run(leave, time.monotonic() + 3)
            self._rdzv_handler._close = lambda: None  # torch would end the job for all machines
            raise


def serve(arguments, line, launcher):
    """torchrun with these arguments; returns the exit code."""
    die_with(launcher, signal.SIGKILL)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # the launcher tells of them
    Life.line = line
    multiprocessing.SubprocessContext, launcher_api.LocalElasticAgent = Life, Agent
    look_often()
    if "LOGLEVEL" not in os.environ:  # the launcher says it in fewer words
        for name in ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
        with contextlib.suppress(OSError, ValueError):  # errors only: no stack for a slow store
            c10 = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
            ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level").value = 2
    while True:
        began, Agent.connected = time.monotonic(), False
        try:
            torchrun(arguments)
            return 0
        except SignalException:
            return STOPPED
        except ChildFailedError as error:
            if not {failure.exitcode for failure in error.failures.values()} & {*FINAL}:
                print(error, file=sys.stderr)
            return 1
        except (RendezvousError, *NO_STORE) as error:
            if not Agent.connected or not isinstance(error, NO_STORE):
                print(f"error: {not_met(error, arguments, time.monotonic() - began)}", file=sys.stderr)
                return 1
            print("torchrun: the rendezvous does not answer, looking for it again", file=sys.stderr)


def look_often():
    """torch's agents look at the rendezvous once a second, and so form a world a second or two late.

    A thousand of them would flood its store, three would not.
    """
    holder = dynamic_rendezvous._BackendRendezvousStateHolder
    dynamic_rendezvous._BackendRendezvousStateHolder = lambda backend, settings: holder(
        backend, settings, cache_duration=min(1.0, settings.max_nodes / 50))
    dynamic_rendezvous._delay = lambda seconds: time.sleep(random.uniform(0.05, 0.15))  # then asks that cache


def not_met(error, arguments, seconds):
    """Why the machines did not find each other, in three lines."""
    place, name = (flag_in(arguments, flag, os.environ) for flag in ("rdzv_endpoint", "rdzv_id"))
    match type(error).__name__:
        case "RendezvousClosedError":
            return (f"job {name} at {place} is over: it is complete, or a machine gave it up\n"
                    "       to train on, start all machines again with a new --rdzv_id")
        case "RendezvousTimeoutError":
            return (f"job {name} at {place}: too few machines came in {seconds:.0f} s\n"
                    "       are all started, with the same --rdzv_id, --rdzv_endpoint and --nnodes?")
    words = " ".join(str(error).split())[:100]
    return (f"job {name}: no rendezvous at {place} in {seconds:.0f} s ({words})\n"
            "       does `python launch/store.py` run there? "
            "is the address one of that machine, not 127.0.1.1?\n"
            "       does a firewall stand between? then start it again")
