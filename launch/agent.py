"""torch's elastic agent, in its own process: it meets the other machines; the launcher has the workers.

Private names of torch that are used or replaced: SubprocessContext and its handlers, LocalElasticAgent, c10's
FLAGS_caffe2_log_level.
"""
import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
from meeting import NO_STORE, Agent, look_often
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher_api
from torch.distributed.run import main as torchrun
from workers import FINAL, MESSAGE_BYTES, STOP, STOPPED, die_with

from common.errors import out_of_memory
from common.options.environment import flag_in


class Worker:
    """A worker as torch wants to see it: pid, exit code, poll()."""

    pid = returncode = None

    def __init__(self):
        self.proc = self  # a handler has a process: here they are one

    def poll(self):
        return self.returncode


class Life(SubprocessContext):
    """The workers of one life on this machine, which the launcher forks, signals and waits for."""

    line, began = None, False

    def _start(self):
        self.tell("life")
        for path in self.starting():  # left by ranks that were killed
            path.unlink()
        self.subprocess_handlers = {place: Worker() for place in range(self.nprocs)}
        for place in self.subprocess_handlers:
            words = self.entrypoint, *map(str, self.args[place])
            if self._numa_options:
                from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as with_numa
                words = with_numa(words, device_index=place, numa_options=self._numa_options)
            Life.began = True
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


def serve(arguments, line, launcher, given=()):
    """torchrun with these arguments, of which a person gave some; returns the exit code."""
    die_with(launcher, signal.SIGKILL)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # the launcher tells of them
    Life.line = line
    multiprocessing.SubprocessContext, launcher_api.LocalElasticAgent = Life, Agent
    argparse.ArgumentParser.error = refuse
    look_often()
    if "LOGLEVEL" not in os.environ:  # the launcher says it in fewer words
        for name in ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
        with contextlib.suppress(OSError, ValueError):  # no stacks for a store that is slow
            c10 = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
            ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level").value = 3
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
        except (ValueError, AssertionError, RuntimeError, OSError) as error:
            if Life.began:
                raise
            words = " ".join(str(error).split())[:200] or "a number is out of range"
            print(f"error: torchrun cannot start so: {words}\n"
                  f"       its flags were {' '.join(given) or 'none'}; see torchrun --help", file=sys.stderr)
            return 1 if out_of_memory(error) else 2


def refuse(parser, message):
    """In place of a page of usage."""
    raise ValueError(message)


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
