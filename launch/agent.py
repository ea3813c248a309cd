"""torch's elastic agent with exit codes passed on, which continues without machines that die as others meet.

What it uses of torch's inside stands in torch_names.py.
"""

import ctypes
import functools
import io
import json
import logging
import multiprocessing
import os
import pickle
import platform
import random
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server import RunResult, WorkerState, local_elastic_agent
from torch.distributed.elastic.multiprocessing import api as processes_api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.launcher import api as launcher_api
from torch.distributed.run import config_from_args, get_args_parser

from common.errors import UserError, may_pass, one_line, say
from common.options import Options
from common.place import STOPPED, in_words
from common.rescue.alarm import AGENT_SECONDS
from common.sealed import sha
from launch.worker import work

FINAL = {*range(2, 8)}  # bad input, no whole checkpoint, ...: another try cannot mend it
# A dead node is noticed after 6 seconds instead of 15, and a missing one waited for 1 instead of 30: one that
# comes later is taken in within seconds. Nodes whose clocks differ by as much would count each other as dead.
MEETING = "last_call_timeout=1,keep_alive_interval={},keep_alive_max_attempt=3"
BEAT_SECONDS = 2
MOST_BEATS = 64  # in a second: all of them rewrite one value of the store
LOOK_SECONDS = 0.1  # of an agent at the rendezvous; torch's look once a second, and form a world that late
ANSWER = timedelta(seconds=10)  # a machine that has come to the rendezvous says what it is within
CLOCKS_APART_SECONDS = 3  # at most
CLOCK_SECONDS = 3  # some machine that is alive beats within
LEAVE_SECONDS = 3  # a machine that leaves has told the store within
END_SECONDS = 60  # at the end of the job for all machines to come; torch waits five minutes for a dead one
# The main thread may wait in C for a silent store. After this time another thread handles the signal: later,
# another machine's stop would be a death to the ranks of this one.
HANDLE_SECONDS = AGENT_SECONDS / 2
FAILED_LIVES = 3  # in a row: they ended soon, and before the training began
SOON_SECONDS = 10


def tell(text):
    """Print a line of the launcher's own."""
    say(text, sys.stderr)


def codes_of(life):
    """Return the exit codes of its processes; None of one that runs."""
    return [handler.proc.poll() for handler in life.subprocess_handlers.values()]


class Signals:
    """The first signal ends this agent; others change nothing.

    A process that is just beginning ends with its fork server.
    """

    first = None  # the arguments of torch's handler
    handled = threading.Event()  # all processes are asked to end
    raise_it = processes_api._terminate_process_handler

    @staticmethod
    def handle(*arguments):
        if not Signals.first:
            Signals.first = arguments
            Signals.raise_it(*arguments)


class Fork:
    """A process of multiprocessing in the place of torch's handler of a process."""

    def __init__(self, process):
        self.proc = process._popen

    def close(self, death_sig):
        self.proc._send_signal(death_sig)
        self.proc._send_signal(signal.SIGCONT)  # nothing else would resume a process that is stopped


class Forks(processes_api.SubprocessContext):
    """The processes of one life on this machine, watched and ended by torch: forks of a fork server."""

    closing = threading.Lock()

    def _start(self):
        Agent.newest._pcontext = self  # torch sets it once all have begun; a signal may come before
        server = multiprocessing.get_context("forkserver")
        for rank in range(self.nprocs):
            outputs = [self.stdouts[rank], self.stderrs[rank]]
            process = server.Process(target=work, args=(self.args[rank], self.envs[rank], outputs))
            process.start()
            self.subprocess_handlers[rank] = Fork(process)

    def _poll(self):
        """Tell the survivors on this machine who was killed: see `how_killed` in common/place.py."""
        notes = Path(self.error_files[0]).parents[2]
        for rank, code in enumerate(codes_of(self)):
            if code and code < 0:
                with suppress(OSError):  # the disk is full
                    (notes / f"death-{self.pids()[rank]}").write_text(in_words(code))
        return super()._poll()

    def _close(self, death_sig, timeout):
        """Ask all to end, and wait as long as a save may take."""
        with self.closing:  # two threads that wait for one process would read its exit code by halves
            super()._close(death_sig, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))


class Agent(local_elastic_agent.LocalElasticAgent):
    """Continues without a machine that dies while others meet or end, and tells the others when it leaves."""

    failed_lives = 0  # lives in a row
    came = frozenset()  # addresses of the machines of this life
    facts = {}  # {name: value} that all machines must have in common
    newest = None  # the agent that runs; another one follows if the store ends

    @property
    def codes(self):
        """Return the exit codes of the newest life."""
        return {*codes_of(self._pcontext)} - {None} if self._pcontext else set()

    def _rendezvous(self, group):
        """Begin a life: find the other machines, if there may be some."""
        if self.meets_others:
            self.meet(group)
        else:
            super()._rendezvous(group)
        self.started = time.monotonic()

    def meet(self, group):
        """Meet again if a machine came and died; torch's own agents would all give up."""
        store = self._rdzv_handler._store
        store.set_timeout(ANSWER)
        while True:
            try:
                self.refuse_if_different(store)
                super()._rendezvous(group)
                self.round = self.state.round
                self.log_departures(group)
                return
            except DistNetworkError:
                raise
            except RendezvousTimeoutError:
                if not self.state.complete:  # else others train, and there was no room for this machine
                    raise
            except RuntimeError:  # a time-out
                tell("torchrun: a machine came and does not answer, meeting again")

    def log_departures(self, group):
        """Log who has left: ranks know only that one of another machine has ended."""
        came = {node.addr for node in self.state.participants}
        gone = sorted(self.came - came)
        if gone and group.group_rank == 0:
            tell(f"torchrun: without {', '.join(gone)}")
        self.came = came

    def refuse_if_different(self, store):
        """Compare a machine that comes with those that are there: its ranks would end them all."""
        self._rdzv_handler.num_nodes_waiting()  # reads the state
        if self.came:
            return
        self.refuse_another_clock()
        key = f"launch/facts/{self._rdzv_handler.get_run_id()}"
        if not self.state.participants:
            store.set(key, json.dumps(self.facts))
        if not store.check([key]):  # those of plain torchrun are there
            return
        for name, value in json.loads(store.get(key)).items():
            if self.facts.get(name) != value:
                raise UserError(
                    f"this machine has {name} {self.facts.get(name)}, the others train with {value}\n"
                    "give every machine the same code, environment, data and options"
                )

    def refuse_another_clock(self):
        """Refuse a clock that is ahead: by it the others are dead, and this machine would throw them out.

        A heartbeat has the time of its machine; if it seems to be too old, or to come, the next one tells.
        """
        first = self.beats()
        deadline = time.monotonic() + CLOCK_SECONDS
        while first and time.monotonic() < deadline:
            ours = time.time()
            for node, beat in self.beats().items():
                theirs = beat.timestamp()
                is_new = beat != first.get(node)
                if (-CLOCKS_APART_SECONDS if is_new else -1) < ours - theirs < CLOCKS_APART_SECONDS:
                    return
                if is_new:
                    raise UserError(
                        f"the clock here says {time.ctime(ours)}, that of {node.addr} {time.ctime(theirs)}\n"
                        "each counts the other as dead: set both right (chronyc tracking)"
                    )
            time.sleep(0.1)

    def beats(self):
        """Return {machine: the time of its last heartbeat}; `state` lacks those that seem to be dead."""
        found = self._rdzv_handler._state_holder._backend.get_state()
        return dynamic_rendezvous.pickle.loads(found[0]).last_heartbeats if found else {}

    def _monitor_workers(self, group):
        """Restart ranks that wait at their start for a dead machine; later they notice by themselves."""
        result = super()._monitor_workers(group)
        if result.is_failed():
            self.log_failure(result)
        if self.meets_others and result.state == WorkerState.HEALTHY:
            state = self.state
            apart = state.round != self.round  # no heartbeats came: others may meet without us
            fewer = apart or len(state.participants) < group.group_world_size
            if apart and not state.closed or fewer and self.notes("start"):
                tell("torchrun: a machine is cut off, or gone before all could train; meeting again")
                self._restart_workers(group)
        return result

    def log_failure(self, result):
        """Print which process has ended first; end the job if another life cannot mend it.

        A survivor saves, and prints the death with what it saved; without one it is printed here.
        """
        rank, failure = next(iter(result.failures.items()))
        death = f"torchrun: rank {rank} (pid {failure.pid}) {in_words(failure.exitcode)}"
        began = self.notes("start") or self.notes("trains")  # then the training counts its lives
        late = time.monotonic() - self.started > SOON_SECONDS
        self.failed_lives = 0 if began or late else self.failed_lives + 1
        if FINAL & self.codes:
            self._remaining_restarts = 0
        elif self.failed_lives == FAILED_LIVES:
            self._remaining_restarts = 0
            tell(f"{death}: {FAILED_LIVES} lives in a row ended at once; their errors are above")
        elif not self._remaining_restarts:
            tell(f"{death}, and no restart is left")
        elif max(self.codes) < 0:
            tell(f"{death}, starting again")

    def notes(self, what):
        """List files of this machine's ranks in this life: one that starts may still wait for others."""
        restart = self._worker_group.spec.max_restarts - self._remaining_restarts
        return [*Path(self._logs_specs._run_log_dir or "/nowhere").glob(f"{what}-{restart}-*")]

    def _exit_barrier(self):
        self._exit_barrier_timeout = END_SECONDS
        super()._exit_barrier()

    @property
    def meets_others(self):
        dynamic = isinstance(self._rdzv_handler, dynamic_rendezvous.DynamicRendezvousHandler)
        return dynamic and self._rdzv_handler.settings.max_nodes > 1

    @property
    def state(self):
        return self._rdzv_handler._state_holder.state

    def run(self, role="default"):
        Agent.newest = self
        try:
            result = super().run(role)
        except Exception:
            if Signals.first:  # it may have come in torch's own shutdown, or have become another error
                self._shutdown(signal.Signals(Signals.first[0]))
            self.leave()
            if Signals.first:
                Signals.raise_it(*Signals.first)
            raise
        if not result:
            tell("torchrun: the job is over, it has not needed this machine")
            return RunResult(WorkerState.SUCCEEDED)
        failed = self.meets_others and result.is_failed()
        if failed and len(self.state.participants) > self._rdzv_handler.settings.min_nodes:
            self.leave()
        return result

    def _shutdown(self, *asked, **settings):
        """Ask all to end, and wait for their saves; `asked` is the signal, if one has come."""
        if asked:
            Signals.handled.set()
        super()._shutdown(*asked, **settings)

    def leave(self):
        """Leave, so that the others train on: by itself torch would end the job for all machines."""
        self._rdzv_handler._close = lambda: None
        thread = threading.Thread(target=self.leave_rendezvous, daemon=True)  # a silent store does not answer
        thread.start()
        thread.join(LEAVE_SECONDS)

    def leave_rendezvous(self):
        with suppress(Exception):  # another kind of rendezvous, or no store any more
            self._rdzv_handler._stop_heartbeats()
            leave = dynamic_rendezvous._RendezvousExitOp()
            self._rdzv_handler._op_executor.run(leave, time.monotonic() + LEAVE_SECONDS)


class RendezvousUnpickler(pickle.Unpickler):
    """In place of torch's `pickle`: reads what agents tell each other; a stranger's could run any code."""

    dumps = staticmethod(pickle.dumps)
    PickleError = pickle.PickleError
    known = {
        f"{dynamic_rendezvous.__name__}._RendezvousState",
        f"{dynamic_rendezvous.__name__}._NodeDesc",
        "datetime.datetime",
        "datetime.timezone",
        "datetime.timedelta",
        "builtins.set",
    }

    @classmethod
    def loads(cls, data):
        return cls(io.BytesIO(data)).load()

    def find_class(self, module, name):
        if f"{module}.{name}" in self.known:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a rendezvous")


def replace_names():
    """Replace names of torch's inside for all agents of this process."""
    launcher_api.LocalElasticAgent = Agent
    dynamic_rendezvous.pickle = RendezvousUnpickler
    # In two containers both agents can have the same name and the same process number.
    dynamic_rendezvous.DynamicRendezvousHandler._node_desc_generator._local_id = random.getrandbits(30)
    # The agent's is asked for with each process: where the name server is away, it takes 5 seconds each time.
    socket.getfqdn = functools.cache(socket.getfqdn)
    # A thousand agents that look so often would flood the store, three do not.
    holder = dynamic_rendezvous._BackendRendezvousStateHolder
    dynamic_rendezvous._BackendRendezvousStateHolder = lambda backend, settings: holder(
        backend, settings, cache_duration=max(LOOK_SECONDS, min(1.0, settings.max_nodes / 50))
    )
    dynamic_rendezvous._delay = lambda seconds: time.sleep(random.uniform(0.5, 1.5) * LOOK_SECONDS)
    # For a record that nobody keeps, each look would inspect the whole stack twice: a third of a core.
    dynamic_rendezvous.get_method_name = lambda: "look"


def watch_signals(folder):
    """Handle a signal on a thread as long as a silent store keeps the main thread in C."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def handle():
        number = os.read(reader, 1)[0]
        if Signals.handled.wait(HANDLE_SECONDS):
            return
        tell("torchrun: the rendezvous does not answer; asked to stop, this machine leaves")
        agent = Agent.newest
        if agent and agent._pcontext:
            agent._pcontext.close(signal.Signals(number))
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(code_of_a_stop())

    processes_api._terminate_process_handler = Signals.handle
    threading.Thread(target=handle, daemon=True).start()


def code_of_a_stop():
    """Return the exit code of a launcher that was asked to end."""
    codes = Agent.newest.codes if Agent.newest else set()
    unsaved = {1, -signal.SIGKILL} & codes and STOPPED not in codes
    return min(codes & FINAL, default=1 if unsaved else STOPPED)


def facts_of(options):
    """Return {name: value} that all machines must have in common, so far as known without the training."""
    files = sorted(Path(__file__).parents[1].glob("common/**/*.py"))
    code = sha(b"".join(map(Path.read_bytes, files)))[:12]
    facts = {"python": platform.python_version(), "torch": torch.__version__, "code": code}
    return facts | options.of_all_ranks() if options else facts


def silence_torchs_logs():
    """Silence the agent's own logs, which say in pages what is said here in a line."""
    for name in ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    c10 = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
    ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level").value = 3  # no stacks for a store that is slow


def refuse(message):
    """Raise an error of three lines in place of a page of usage."""
    raise ValueError(message)


def settle(args, folder):
    """Fill in what a person has left open; `folder` is temporary."""
    if args.log_dir in (None, "", os.devnull):
        args.log_dir = folder  # else torchrun leaves a folder behind at every start, or has none for notes
    machines = int(args.nnodes.rpartition(":")[2])
    meeting = MEETING.format(max(BEAT_SECONDS, -(-machines // MOST_BEATS)))
    args.rdzv_conf = f"{meeting},{args.rdzv_conf}".strip(",")  # the last one of a name counts
    if args.standalone or args.nnodes in ("1", "1:1") and not args.rdzv_endpoint:
        # On one machine the agent meets only itself: a file is enough, and no port is open to the network.
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = f"{folder}/rendezvous"
        args.rdzv_id = Path(folder).name
        args.rdzv_conf += ",store_type=file,keep_alive_interval=3600"  # each heartbeat makes the file longer
        args.local_addr = "127.0.0.1"
    args.local_addr = args.local_addr or address_towards(args.rdzv_endpoint)
    seconds = getattr(args, "shutdown_timeout", None)  # newer than torch 2.11
    if seconds is not None:
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(seconds)


def address_towards(endpoint):
    """Find this machine's address towards HOST:PORT: its own name may be a loopback, as on Debian."""
    host, _, port = endpoint.rpartition(":")
    with suppress(OSError, ValueError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port) % 65536))  # sends nothing
        address, _ = probe.getsockname()
        if not address.startswith("127."):
            return address


def serve(arguments: list[str], folder: str, options: Options | None) -> int:
    """Run torchrun with these arguments; return the exit code."""
    replace_names()
    watch_signals(folder)
    if "LOGLEVEL" not in os.environ:
        silence_torchs_logs()
    try:
        parser = get_args_parser()
        parser.error = refuse
        args = parser.parse_args(arguments)
        settle(args, folder)
        config, command, words = config_from_args(args)
        Agent.facts = facts_of(options)
        if not (args.module or args.no_python or args.numa_binding or args.start_method != "forkserver"):
            local_elastic_agent.start_processes = start_forks
            words = [args.training_script, *args.training_script_args]
        return serve_config(config, command, words)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UserError(
            f"torchrun cannot start so: {one_line(error)}\n"
            f"its flags were {' '.join(arguments)}, its folder {folder}; see torchrun --help",
            code=1 if Agent.newest or may_pass(error) else 2,
        ) from error


def start_forks(start_method, numa_options, **settings):
    """Start processes as forks, in place of torch's start_processes."""
    forks = Forks(**settings)
    forks.start()
    return forks


def serve_config(config, command, words):
    """Run the agent, again if the store ends; return the exit code."""
    while True:
        Agent.newest = None
        try:
            launcher_api.launch_agent(config, command, words)
            return 0
        except processes_api.SignalException:
            return code_of_a_stop()
        except ChildFailedError:
            codes = Agent.newest.codes
            return min(codes & FINAL, default=STOPPED if codes == {STOPPED} else 1)
        except (RendezvousError, DistNetworkError) as error:
            agent = Agent.newest
            had_met = agent and (agent.meets_others or agent._pcontext)
            store_is_gone = isinstance(error, RendezvousConnectionError | DistNetworkError)
            if not (had_met and store_is_gone):
                raise UserError(not_met(error, config), code=1) from error
            tell("torchrun: the rendezvous does not answer, looking for it again")


def not_met(error, config):
    """Say in three lines why the machines did not find each other."""
    job = f"job {config.run_id} at {config.rdzv_endpoint}"
    if isinstance(error, RendezvousClosedError):
        return f"{job} is over: complete, or ended\nto go on, start all machines again with a new --rdzv_id"
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"{job}: too few machines came\n"
            "are all started, with the same --rdzv_id, --rdzv_endpoint and --nnodes?"
        )
    return (
        f"{job}: no rendezvous ({one_line(error)})\n"
        "does launch/store.py, or machine 0, run there? is its port free, its address not 127.0.1.1?"
    )
