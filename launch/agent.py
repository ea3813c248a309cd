"""torch's elastic agent, in a process of its own: it meets the other machines; the launcher has the workers.

Private names of torch that are used or replaced: SubprocessContext and its handlers, LocalElasticAgent,
dynamic_rendezvous' _delay, _BackendRendezvousStateHolder, _RendezvousExitOp, _op_executor, _stop_heartbeats,
_state_holder, _this_node, _store; the agent's _rendezvous and _monitor_workers.
"""
import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistStoreError
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, dynamic_rendezvous
from torch.distributed.launcher import api as launcher_api
from torch.distributed.run import main as torchrun
from workers import FINAL, MESSAGE_BYTES, STOP, STOPPED, die_with

from common.options.environment import flag_in

ANSWER = timedelta(seconds=10)  # a machine that has come to the rendezvous says what it is within


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
    """Does without a machine that dies as others meet, and says that it leaves."""

    def _rendezvous(self, group):
        """Once more without a machine that came and died: torch's agents would all give up."""
        while True:
            try:
                if self.meets_others:
                    self._rdzv_handler._store.set_timeout(ANSWER)
                return super()._rendezvous(group)
            except DistStoreError:
                print("torchrun: a machine came and does not answer, meeting again", file=sys.stderr)

    def _monitor_workers(self, group):
        """Ranks that start would wait for those of a dead machine; later they notice by themselves."""
        if self.meets_others and self._pcontext.starting():
            here = self._rdzv_handler._state_holder.state.participants
            if len(here) < group.group_world_size or self._rdzv_handler._this_node not in here:
                print("torchrun: a machine has gone before all could train, meeting again", file=sys.stderr)
                self._restart_workers(group)
        return super()._monitor_workers(group)

    @property
    def meets_others(self):
        return isinstance(self._rdzv_handler, dynamic_rendezvous.DynamicRendezvousHandler)

    def run(self, role="default"):
        try:
            return super().run(role)
        except SignalException:
            with contextlib.suppress(Exception):  # another kind of rendezvous, or it does not answer
                self._rdzv_handler._stop_heartbeats()
                leave = dynamic_rendezvous._RendezvousExitOp()
                self._rdzv_handler._op_executor.run(leave, time.monotonic() + 3)
            raise


def serve(arguments, line, launcher):
    """torchrun with these arguments; returns the exit code."""
    die_with(launcher, signal.SIGKILL)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # the launcher tells of them
    began, Life.line = time.monotonic(), line
    multiprocessing.SubprocessContext, launcher_api.LocalElasticAgent = Life, Agent
    look_often()
    if "LOGLEVEL" not in os.environ:
        for name in ("agent.server.api", "multiprocessing.api"):  # the launcher says it in fewer words
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun(arguments)
        return 0
    except SignalException:
        return STOPPED
    except ChildFailedError as error:
        if not {failure.exitcode for failure in error.failures.values()} & {*FINAL}:
            print(error, file=sys.stderr)
    except RendezvousError as error:
        print(f"error: {not_met(error, arguments, time.monotonic() - began)}", file=sys.stderr)
    return 1


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
