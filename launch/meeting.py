"""How torch's agent meets the other machines of a job, continues without those that die, and leaves them.

Private names of torch that are used or replaced: dynamic_rendezvous' _delay, _BackendRendezvousStateHolder,
_RendezvousExitOp, _op_executor, _stop_heartbeats, _state_holder, _store, _close; the agent's _rendezvous,
_monitor_workers, _restart_workers and _exit_barrier.
"""
import contextlib
import random
import sys
import time
from datetime import timedelta

from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server import RunResult, WorkerState
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.launcher.api import LocalElasticAgent

ANSWER = timedelta(seconds=10)  # a machine that has come to the rendezvous says what it is within
AWAY_SECONDS = 3  # a machine that leaves to meet again is in no list for a moment
NO_STORE = (RendezvousConnectionError, DistNetworkError)


class Agent(LocalElasticAgent):
    """Continues without a machine that dies while others meet or end, and tells the others when it leaves."""

    connected = False  # to the store

    def _rendezvous(self, group):
        """Meets again if a machine came and died; torch's own agents would all give up."""
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
                if not self.state.complete:  # else others train, and there was no room for this machine
                    raise
            except RuntimeError:  # a time-out
                print("torchrun: a machine came and does not answer, meeting again", file=sys.stderr)
            finally:
                store.set_timeout(patience)

    def _monitor_workers(self, group):
        """Restarts ranks that wait at their start for a dead machine; later they notice by themselves."""
        result = super()._monitor_workers(group)
        if not self.meets_others:
            return result
        state = self.state
        apart = state.round != self.round  # no heartbeats came: others may meet without us
        fewer = apart or len(state.participants) < group.group_world_size
        if not fewer:
            self.whole = time.monotonic()
        if result.state == WorkerState.SUCCEEDED:
            alone = time.monotonic() - self.whole > AWAY_SECONDS
            return result if alone or self.all_ended(group) else RunResult(WorkerState.HEALTHY)
        if apart and not state.closed or fewer and self._pcontext.starting():
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

    def _restart_workers(self, group):
        """Restarts the workers, unless all machines have just ended well: another one then comes too late."""
        if self.ended and group.store.add("ended", -1) == group.group_world_size - 1:
            group.store.set("all ended", "1")
        else:
            super()._restart_workers(group)

    def _exit_barrier(self):
        """Left out: torch waits five minutes for a dead machine, and misses one that must train again."""
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


def look_often():
    """torch's agents look at the rendezvous once a second, and so form a world a second or two late.

    A thousand of them would flood its store, three would not.
    """
    holder = dynamic_rendezvous._BackendRendezvousStateHolder
    dynamic_rendezvous._BackendRendezvousStateHolder = lambda backend, settings: holder(
        backend, settings, cache_duration=min(1.0, settings.max_nodes / 50))
    dynamic_rendezvous._delay = lambda seconds: time.sleep(random.uniform(0.05, 0.15))  # then asks that cache
