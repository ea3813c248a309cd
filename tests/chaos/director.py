"""Strikes, waits for the training to go on, and counts; the run folder's own records say what was lost."""
import collections
import json
import signal
import time

from jobs import PACED, TESTS, lives, reached, until

from tests.chaos import checks, events, points_names
from tests.chaos.cluster import Cluster

INTERVAL = 7                                                        # steps between saves: often within one
COMMON = [f"--save-every={INTERVAL}", "--save-seconds=0", "--keep=2", "--hang-timeout=10", "--check-every=25", "--audit",
          "--no-tensorboard", "--log-every=1", "--global-batch-size=32"]
FLAVOURS = {                                                        # name: (flags, whether any world gives the same bits)
    "plain": ([*PACED[:2], "--lr=0.01"], False),                    # float64, no dropout: 1e-9
    "bitwise": ([f"--model={TESTS}/paced.py:dropping", PACED[1], "--virtual-ranks=8", "--ema-decay=0.9",
                 "--optimizer=adamw"], True)}
RECOVERY = 150                                                      # seconds within which training must go on after anything


class Campaign:
    def __init__(self, jobs, rng, count, short=False, cold=0.0, epochs=20, say=print, **env):
        self.jobs, self.rng, self.cold, self.epochs, self.say, self.env = jobs, rng, cold, epochs, say, env
        self.todo = events.schedule(rng, count, points_names(), short)
        self.size, self.number = None, len(list(jobs.folder.glob("run-*")))
        self.kinds = ["plain", "store"] if short else []            # of the first clusters; then as the dice fall
        self.tally, self.log, self.lost, self.notes = collections.Counter(), [], [], []
        self.recovered, self.orphaned, self.references = [], [], {}
        self.steps = epochs * 11
        self.pace = "0.008"

    # ---- runs ------------------------------------------------------------------------------------------------------
    def go(self):
        while self.todo:
            self.train(list(FLAVOURS)[len(self.notes) % len(FLAVOURS)])
            self.number += 1

    def flags(self, run, flavour):
        return [f"--run-dir={run}", f"--epochs={self.epochs}", *COMMON, *FLAVOURS[flavour][0]]

    def reference(self, flavour):
        """The same run, undisturbed; once."""
        if flavour not in self.references:
            run = self.jobs.folder / f"reference-{flavour}-{self.number}"
            job = self.jobs.python("train_ddp.py", *self.flags(run, flavour), PACE="0")
            assert job.wait() == 0, job.output
            self.references[flavour] = run
        return self.references[flavour]

    def train(self, flavour):
        """One training from its first step to its last, struck all along."""
        self.folder = self.jobs.folder / f"run-{self.number}"
        self.run, self.armed, self.journal = (self.folder / name for name in ("run", "armed", "journal"))
        self.armed.mkdir(parents=True)
        self.now, self.struck = self.flags(self.run, flavour), []
        reference = self.reference(flavour)
        self.launch()
        idle = 0
        while not self.done():
            if self.cluster.ended():
                before = len(lives(self.run))
                self.relaunch()
                idle = idle + 1 if len(lives(self.run)) == before else 0
                assert idle < 4, f"four submissions in a row have not begun training\n{self.outputs()}"
            elif self.todo and self.advance(self.todo[0].steps):
                event = self.todo.pop(0)
                self.strike(event)
                if any((self.run / "checkpoints").glob("step-*")):
                    checks.checkpoints_are_whole(self.run, tries=3)
            elif not self.cluster.ended():
                self.await_end()
        self.cluster.close()
        self.check(flavour, reference)

    def await_end(self):
        """The agents' own end, or, the training being complete, ours for those that wait for each other: torchrun's exit
        barrier takes 300 s when one node was given another life in the last moment."""
        quiet = []

        def over():
            if self.step_on_disk() < self.steps or self.cluster.workers():
                quiet.clear()
            else:
                quiet.append(time.monotonic())
            return self.cluster.ended() or quiet and quiet[-1] - quiet[0] > 15
        self.until(over, "the training's end", 2 * RECOVERY)
        if not self.cluster.ended():
            self.tally["exit barriers cut short"] += 1
            self.cluster.strike([agent.pid for agent in self.cluster.living], "TERM")
            self.until(self.cluster.ended, "the agents to end", 60)

    def launch(self):
        kind = self.kinds.pop(0) if self.kinds else None
        env = {"CHAOS_ARMED": str(self.armed), "CHAOS_JOURNAL": str(self.journal), "PACE": self.pace}
        self.cluster = Cluster(self.jobs, self.rng, self.now, env | self.env, self.rng.random() < self.cold, kind, self.size)
        self.tally[f"cluster {self.cluster.kind}{' cold' if self.cluster.cold else ''}"] += 1

    def relaunch(self):
        codes = self.cluster.finish(60)
        self.orphaned.append(self.cluster.orphans())
        self.struck += self.cluster.signalled
        assert 0 not in codes or self.step_on_disk() == self.steps, f"an agent left with 0 before the end\n{self.outputs()}"
        self.launch()
        self.settle(len(lives(self.run)))

    def step_on_disk(self):
        return max([int(p.name[5:]) for p in (self.run / "checkpoints").glob("step-*")], default=-1)

    def done(self):
        return self.cluster.ended() and self.step_on_disk() == self.steps

    def outputs(self):
        return "\n".join(agent.output[-3000:] for agent in self.cluster.agents)

    # ---- one event -----------------------------------------------------------------------------------------------------
    def advance(self, steps):
        """Whether the training has made so many steps more and is not over, and a random moment has passed."""
        start = reached(self.run) if lives(self.run) else 0
        self.until(lambda: self.cluster.ended() or self.step_on_disk() == self.steps or (
            lives(self.run) and reached(self.run) >= min(start + steps, self.steps)), "steps")
        time.sleep(self.rng.random() * 2 * float(self.pace))        # any instant of a step
        return not self.cluster.ended() and self.step_on_disk() < self.steps

    def until(self, condition, what, deadline=RECOVERY):
        try:
            return until(condition, f"{what} in {self.run}", deadline)
        except AssertionError as error:
            raise AssertionError(f"{error}\nlast events {self.log[-3:]}\n{self.outputs()}") from None

    def settle(self, before):
        """A new life has made a step, or the job has ended; seconds since the call."""
        began = time.monotonic()

        def there():
            found = lives(self.run)
            return self.cluster.ended() or len(found) > before and reached(self.run) > found[-1]["step"] or (
                len(found) > before and found[-1]["step"] == self.steps)
        self.until(there, "training to go on")
        return time.monotonic() - began

    def strike(self, event):
        before = len(lives(self.run))
        act = getattr(self, f"_{event.target}")
        landed, new_life = act(event)
        name = " ".join(filter(None, [event.target, event.signal, event.point]))
        self.log.append({"event": name, "landed": landed, "step": reached(self.run) if before else 0})
        self.tally[f"{event.target} {event.signal}".strip()] += bool(landed)
        self.tally["not landed"] += not landed
        took = ""
        if landed and new_life:
            self.recovered.append((event.target, self.settle(before)))
            took = f": on after {self.recovered[-1][1]:.1f} s"
        self.say(f"{len(self.log):4}  step {self.log[-1]['step']:4}  {self.cluster.kind:5} x{len(self.cluster.living)}  {name}"
                 f"{took if landed else ': came too late'}")

    def arm(self, event, rank="any"):
        path = self.armed / f"{event.point}.{rank}"
        path.write_text(event.signal)
        return path

    def journaled(self):
        return [json.loads(line) for line in self.journal.read_text().splitlines()] if self.journal.exists() else []

    def _point(self, event):
        """Armed, and waited for; what only comes at the end of the run stays armed until then."""
        if event.point in ("left", "exit") and self.cluster.kind != "plain":
            event = event._replace(point="leave")                   # then torchrun lets the other agents wait for 300 s
        count, path = len(self.journaled()), self.arm(event)
        if event.point in points_names()["end"]:
            return 1, False
        limit = (reached(self.run) if lives(self.run) else 0) + 30
        self.until(lambda: self.cluster.ended() or not path.exists() or (
            lives(self.run) and reached(self.run) > min(limit, self.steps - 1)), "somebody to come by the point")
        landed = self.landed(path, count)
        return landed, landed

    def landed(self, path, count):
        """How many have been struck since; the one that took the file writes its line in a moment."""
        try:
            path.unlink()
        except FileNotFoundError:
            self.until(lambda: len(self.journaled()) > count, "the line of a process that is about to die", 10)
        return len(self.journaled()) - count

    def _pair(self, event):
        count, path, before = len(self.journaled()), self.arm(event), len(lives(self.run))
        landed = self._worker(event._replace(signal="KILL"))[0]
        self.until(lambda: self.cluster.ended() or not path.exists() or (
            len(lives(self.run)) > before and reached(self.run) > lives(self.run)[-1]["step"] + 2), "somebody to come by the point")
        self.tally["second deaths"] += self.landed(path, count)
        return landed, landed

    _lock = _point

    def _worker(self, event):
        found = self.cluster.someone()
        if not found:
            return 0, False
        if event.signal == "STOP CONT":                             # slow, not dead: nothing may happen
            landed = self.cluster.strike(found[1:], "STOP")
            self.cluster.signalled = self.cluster.signalled[:-landed] if landed else self.cluster.signalled
            time.sleep(self.rng.random() * 0.5)
            self.jobs.kill(found[1], signal.SIGCONT)
            return landed, False
        return max([self.cluster.strike(found[1:], name) for name in event.signal.split()][0], 0), True

    def _workers(self, event):
        found = self.cluster.someone()
        return (self.cluster.strike(found[0].workers, event.signal), True) if found else (0, False)

    def _agent(self, event):
        """Its workers must save, and be gone with it."""
        agent = self.rng.choice(self.cluster.living)
        landed, alone = self.cluster.strike([agent.pid], event.signal), len(self.cluster.living) == 1
        self.until(lambda: agent.poll() is not None, "the agent to end")
        self.orphaned.append(self.cluster.orphans())
        return landed, not alone

    def _node(self, event):
        agent = self.rng.choice(self.cluster.living)
        alone = len(self.cluster.living) == 1
        landed = self.cluster.strike([agent.pid, *agent.workers], event.signal)
        self.until(lambda: agent.poll() is not None, "the agent to end")
        return landed, not alone

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
        landed = self.cluster.strike([agent.pid for agent in self.cluster.living], event.signal)
        self.until(self.cluster.ended, "the agents to end", 60)
        return landed, False

    def _grow(self, event):
        if self.cluster.kind == "plain" or len(self.cluster.living) >= 3:
            return self._resize(event._replace(signal="TERM"))
        self.cluster.add(self.rng.randint(1, 2))
        return 1, True

    def _flap(self, event):
        if self.cluster.kind == "plain":
            return self._resize(event._replace(signal="TERM"))
        for _ in range(3):
            agent = self.cluster.add(1)
            until(lambda agent=agent: agent.poll() is not None or agent.workers, "a node that comes and goes", 60)
            time.sleep(self.rng.random())
            self.cluster.strike([agent.pid, *agent.workers], "KILL")
            self.until(lambda agent=agent: agent.poll() is not None, "the agent to end")
        return 3, True

    def _freeze(self, event):
        """Stopped for good: the others must notice by themselves, so there have to be others."""
        found = self.cluster.someone()
        if not found or len(self.cluster.workers()) < 2:
            return 0, False
        return self.cluster.strike(found[1:], "STOP"), True

    # ---- the end of a run ------------------------------------------------------------------------------------------------
    def check(self, flavour, reference):
        until(lambda: not self.jobs.alive(), "every process to end", 5)
        self.struck += self.cluster.signalled
        journal = self.journaled()
        hard = {s["pid"] for s in self.struck + journal if s["signal"] in checks.HARD}
        for line in journal:
            self.tally[f"at {line['point']}"] += 1
        self.lost += checks.steps_lost(self.run, hard, INTERVAL)
        counts = checks.samples_are_exact(self.run)
        checks.checkpoints_are_whole(self.run)
        checks.every_step_is_logged_once(self.run, self.steps)
        worst = checks.weights_equal(self.run, reference, FLAVOURS[flavour][1])
        checks.nothing_is_left(self.run, self.folder)
        rescues, count = checks.saves_and_rescues(self.run)
        self.notes.append({"flavour": flavour, "lives": count, "rescues": rescues, "difference": worst, **counts})
        self.say(f"run {len(self.notes)} ({flavour}): {count} lives, {rescues} rescues, {counts}, weights differ by {worst}")
