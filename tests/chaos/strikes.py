"""What each kind of event does to a cluster: returns how many processes it hit, and whether a new life must
follow.
"""

import json
import signal
import time

from jobs import lives, reached, state

from tests.chaos import EPOCH, MISSED, RECOVERY, points_names

PAUSES_SECONDS = (0.0, 0.5, 3.0, 9.0)  # at most; the others notice, meet, start, train


class Strikes:
    """The half of a Campaign that harms; the other half launches, waits and checks."""

    def strike(self, event):
        before = len(lives(self.run))
        landed, new_life = getattr(self, f"_{event.target}")(event)
        name = " ".join(filter(None, [event.target, event.signal, event.point]))
        self.log.append({"event": name, "landed": landed, "step": self.step()})
        self.tally[f"{event.target} {event.signal}"] += bool(landed)
        if landed and new_life:
            self.recovered.append(self.settle(before))
        print(
            f"{len(self.log):4}  {self.cluster.kind:5} x{len(self.cluster.living)}  {self.log[-1]}",
            flush=True,
        )

    # ---- where a process comes by ----
    def arm(self, event):
        path = self.armed / f"{event.point}.any"
        path.write_text(event.signal)
        return path

    def journaled(self):
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [json.loads(line) for line in lines]

    def _point(self, event):
        """Armed, and waited for; what only comes at the end of the run stays armed until then."""
        if event.point in ("left", "exit") and self.cluster.kind != "plain":
            event = event._replace(point="leave")  # then torchrun lets the other agents wait for 300 s
        count = len(self.journaled())
        path = self.arm(event)
        if event.point in points_names()["end"]:
            return 1, False
        limit = min(self.step() + 30, self.steps - 1)
        landed = self.landed(path, count, limit)
        return landed, landed

    def _lock(self, event):
        """A process that is alone stays so: nobody else can notice it."""
        alone = lives(self.run)[-1]["world"] == 1
        return (0, False) if alone else self._point(event)

    def landed(self, path, count, limit):
        """How many are struck up to step `limit`; the one that takes the file writes its line in a moment."""
        self.until(lambda: self.over() or not path.exists() or self.step() > limit, "a process at the point")
        try:
            path.unlink()
        except FileNotFoundError:
            self.until(lambda: len(self.journaled()) > count, "the line of a process that is about to die")
        return len(self.journaled()) - count

    def _pair(self, event):
        """A second one dies of the first one's consequences."""
        count = len(self.journaled())
        path = self.arm(event)
        landed = self._worker(event._replace(signal="KILL"))[0]
        limit = self.step() + 12  # of steps that the next life makes
        self.tally["second deaths"] += self.landed(path, count, limit)
        return landed, landed

    # ---- at any instant ----
    def _worker(self, event):
        found = self.cluster.someone()
        if not found:
            return 0, False
        if event.signal == "STOP CONT":
            return self.pause(found[1]), False
        return max(self.cluster.strike(found[1:], name) for name in event.signal.split()), True

    def pause(self, pid):
        """Slow, not dead: nothing may happen."""
        landed = self.jobs.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.random() * 0.5)
        self.jobs.kill(pid, signal.SIGCONT)
        return int(landed)

    def _loader(self, event):
        """Its rank misses it within seconds, saves and leaves.

        Not missed: the rank has all its shares, and trains on past the end of the epoch.
        """
        found = []

        def strike():
            found[:] = self.cluster.loader() or ()  # it may end with its epoch: the next one has others
            if found and event.signal == "STOP CONT":
                return self.pause(found[1])
            return found and self.cluster.strike(found[1:], event.signal)

        if not self.until(lambda: strike() or self.over(), "a loading process") or not found:
            return 0, False
        if event.signal in ("TERM", "STOP CONT"):  # a rank's to answer
            return 1, False
        epoch_over = reached(self.run) + EPOCH + 1
        patience = MISSED if event.target == "loader" else RECOVERY
        step = 0

        def left():
            return state(found[0]) in "ZX"

        while not (self.over() or left() or step >= epoch_over):
            step = reached(self.run)  # each step begins the wait anew
            self.until(
                lambda step=step: self.over() or left() or reached(self.run) != step,
                "the rank of a dead loading process to leave",
                patience,
            )
        self.tally["loaders missed" if left() else "loaders not missed"] += 1
        return 1, left()

    _stall = _loader

    def _workers(self, event):
        found = self.cluster.someone()
        return (self.cluster.strike(found[0].workers, event.signal), True) if found else (0, False)

    def _freeze(self, event):
        """Stopped for good: the others must notice by themselves, so there have to be others."""
        return self._worker(event._replace(signal="STOP")) if len(self.cluster.workers()) > 1 else (0, False)

    def _agent(self, event):
        """Its workers must save, and be gone with it."""
        agent = self.rng.choice(self.cluster.living)
        others = len(self.cluster.living) > 1
        node = agent.workers if event.target == "node" else []
        landed = self.cluster.strike([agent.pid, *node], event.signal)
        self.until(lambda: agent.poll() is not None, "the agent to end")
        if not node:
            self.cluster.await_orphans(self.patience)
        return landed, others

    _node = _agent

    def _store(self, event):
        if not self.cluster.store:
            return self._job(event)
        landed = self.jobs.kill(self.cluster.store.pid)
        self.until(self.cluster.ended, "the agents to end with their store", 60)
        return int(landed), False

    def _job(self, event):
        pids = [pid for agent in self.cluster.living for pid in [agent.pid, *agent.workers]]
        return self.cluster.strike(pids, event.signal), False

    def _resize(self, event):
        """Everything is told to stop, and comes back in another shape."""
        landed = self.cluster.strike([agent.pid for agent in self.cluster.living], "TERM")
        self.until(self.cluster.ended, "the agents to end", 60)
        return landed, False

    def _grow(self, event):
        if len(self.cluster.living) >= self.cluster.most:
            return self._resize(event)
        self.cluster.add(self.rng.randint(1, 2))
        return 1, True

    def _bunch(self, event):
        """As a cloud takes machines back: the second often dies while the others meet because of the first.

        tests/launch/test_agent.py has the worst of these moments one by one.
        """
        for _ in range(self.rng.randint(1, 3)):
            living = self.cluster.living
            if len(living) == self.cluster.most or len(living) > 1 and self.rng.random() < 0.7:
                agent = self.rng.choice(living)
                self.cluster.strike([agent.pid], event.signal)
                agent.wait()
            else:
                self.cluster.add(self.rng.randint(1, 2))
            time.sleep(self.rng.uniform(0, self.rng.choice(PAUSES_SECONDS)))
        assert self.advance(3) or self.step_on_disk() == self.steps, self.outputs()
        return 1, False
