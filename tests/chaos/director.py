"""Launches, waits for the training to go on, and checks; the run folder's own records say what was lost."""
import collections
import functools
import time

from jobs import PACED, TESTS, lives, reached, until

from tests.chaos import EPOCH, HANG, RECOVERY, checks, events, points_names
from tests.chaos.cluster import Cluster
from tests.chaos.strikes import Strikes

INTERVAL, LARGE_INTERVAL = 7, 40                # steps between saves: often within one; of a large state
COMMON = ["--save-seconds=0", "--keep=2", f"--hang-timeout={HANG}",
          "--check-every=25", "--audit",
          "--no-tensorboard", "--log-every=1", "--global-batch-size=32"]
FLAVOURS = {  # name: (flags, whether any world gives the same bits)
    # no dropout: 1e-9
    "plain": ([PACED[0], f"--dataset={TESTS}/paced.py:files", "--workers=2", "--lr=0.01"], False),
    "bitwise": ([f"--model={TESTS}/paced.py:dropping", PACED[1], "--virtual-ranks=8", "--ema-decay=0.9",
                 "--optimizer=adamw"], True)}
STAGES = {"stages": ([f"--model={TESTS}/paced.py:deep", PACED[1], "--micro-batch-size=8", "--stages=2",
                      "--lr=0.01"], False)}


class Campaign(Strikes):
    def __init__(self, jobs, rng, count, short=False, cold=0.0, epochs=20, say=print, script="ddp", disk=None,
                 state=0, only=(), **env):
        """`disk`: of netfs.served, each mount a machine; `state`: MB; `only`: the targets of events."""
        self.jobs, self.rng, self.cold, self.epochs, self.say = jobs, rng, cold, epochs, say
        self.script, self.disk, self.only = script, disk, only
        self.env = env | {"CHAOS_SCRIPT": script, "STATE_MB": str(state)}
        self.flavours = STAGES if script == "mp" else FLAVOURS
        self.interval = LARGE_INTERVAL if state > 50 else INTERVAL
        self.patience = 60 if disk or state > 50 else 5  # seconds: the workers of a dead agent save and leave
        self.todo = events.schedule(rng, count, points_names(), short, only)
        self.size, self.number = None, len(list(jobs.folder.glob("run-*")))
        self.kinds = ["plain", "store"] if short else []  # of the first clusters; then as the dice fall
        self.tally, self.log, self.changes, self.notes = collections.Counter(), [], [], []
        self.recovered, self.missed, self.orphaned, self.references = [], [], [], {}
        self.steps = epochs * EPOCH
        self.pace = "0.008"

    # ---- runs -------------------------------------------------------------------------------------
    def go(self):
        while self.todo:
            loading = self.only and set(self.only) <= {"loader", "stall"}  # one flavour has such processes
            flavours = ["plain"] if loading else list(self.flavours)
            self.train(flavours[len(self.notes) % len(flavours)])
            self.number += 1

    def flags(self, run, flavour):
        return [f"--run-dir={run}", f"--epochs={self.epochs}", f"--save-every={self.interval}", *COMMON,
                *self.flavours[flavour][0]]

    def reference(self, flavour):
        """The same run, undisturbed; once."""
        if flavour not in self.references:
            run = self.jobs.folder / f"reference-{flavour}-{self.number}"
            script, env = f"train_{self.script}.py", {"PACE": "0", "STATE_MB": self.env["STATE_MB"]}
            start = functools.partial(self.jobs.torchrun, 2) if self.script == "mp" else self.jobs.python
            job = start(script, *self.flags(run, flavour), **env)
            assert job.wait(600) == 0, job.output
            self.references[flavour] = run
        return self.references[flavour]

    def train(self, flavour):
        """One training from its first step to its last, struck all along."""
        self.folder = self.jobs.folder / f"run-{self.number}"
        self.run, self.armed, self.journal = (self.folder / name for name in ("run", "armed", "journal"))
        self.views = [self.run]
        if self.disk:  # we look at what the server has
            places = (self.disk.server, *self.disk.mounts)
            self.run, *self.views = (path / f"run-{self.number}" for path in places)
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
                if flavour != "plain" and event.target in ("loader", "stall"):
                    event = event._replace(target="worker", signal="KILL")  # its samples are in memory
                self.strike(event)
                small = self.interval == INTERVAL  # while a large one is read, an older one is deleted
                if small and any((self.run / "checkpoints").glob("step-*")):
                    checks.checkpoints_are_whole(self.run, tries=3)
            elif not self.cluster.ended():
                self.await_end()
        self.cluster.close()
        self.check(flavour, reference)

    def await_end(self):
        """The agents' own end, or, the training being complete, ours for those that wait for each other:
        torchrun's exit barrier takes 300 s when one node was given another life in the last moment.
        """
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
            self.cluster.cut = True
            self.kinds.insert(0, "plain")  # what follows has nobody to wait for
            # it hears nothing else in there
            self.cluster.strike([agent.pid for agent in self.cluster.living], "KILL")
            self.until(self.cluster.ended, "the agents to end", 60)

    def launch(self):
        kind = self.kinds.pop(0) if self.kinds else None
        env = {"CHAOS_ARMED": str(self.armed), "CHAOS_JOURNAL": str(self.journal), "PACE": self.pace}
        cold = self.rng.random() < self.cold
        self.cluster = Cluster(self.jobs, self.rng, self.now, self.views, env | self.env, cold, kind,
                               self.size)
        self.tally[f"cluster {self.cluster.kind}{' cold' if self.cluster.cold else ''}"] += 1

    def relaunch(self):
        codes = self.cluster.finish(60)
        self.orphaned.append(self.cluster.orphans(self.patience))
        self.struck += self.cluster.signalled
        assert 0 not in codes or self.step_on_disk() == self.steps, (
            f"an agent left with 0 before the end\n{self.outputs()}")
        self.launch()
        self.settle(len(lives(self.run)))

    def step_on_disk(self):
        return max([int(p.name[5:13]) for p in (self.run / "checkpoints").glob("step-*")], default=-1)

    def over(self):
        """Nothing more happens by itself: the submission has ended, or the last step is on the disk."""
        return self.cluster.ended() or self.step_on_disk() == self.steps

    def done(self):
        """The last submission has come to its end by itself; after one that we cut short, the next finds
        nothing to do.
        """
        clean = not self.cluster.cut and 0 in [agent.poll() for agent in self.cluster.agents]
        return self.cluster.ended() and clean and self.step_on_disk() == self.steps

    def outputs(self):
        return "\n".join(agent.output[-3000:] for agent in self.cluster.agents)

    # ---- one event --------------------------------------------------------------------------------
    def advance(self, steps):
        """Whether the training has made so many steps more and is not over, and a random moment has passed.
        """
        start = reached(self.run) if lives(self.run) else 0
        self.until(lambda: self.over() or (
            lives(self.run) and reached(self.run) >= min(start + steps, self.steps)), "steps")
        time.sleep(self.rng.random() * 2 * float(self.pace))  # any instant of a step
        return not self.over()

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
            return self.over() or len(found) > before and reached(self.run) > found[-1]["step"] or (
                len(found) > before and found[-1]["step"] == self.steps)
        self.until(there, "training to go on")
        return time.monotonic() - began

    # ---- the end of a run -------------------------------------------------------------------------
    def check(self, flavour, reference):
        until(lambda: not self.jobs.alive(), "every process to end", self.patience)
        self.struck += self.cluster.signalled
        journal = self.journaled()
        hard = {s["pid"] for s in self.struck + journal if s["signal"] in checks.HARD}
        for line in journal:
            self.tally[f"at {line['point']}"] += 1
        self.changes += checks.changes(self.run, hard)
        checks.little_is_lost(self.changes, self.interval)
        checks.every_second_has_its_bucket(
            self.run, {s["pid"] for s in self.struck + journal if s["signal"] in ("KILL", "SEGV")})
        counts = checks.samples_are_exact(self.run)
        checks.checkpoints_are_whole(self.run)
        said = "\n".join(agent.output for agent in self.cluster.agents)
        assert "trying the one before" not in said, f"a kill has left a damaged checkpoint\n{said[-3000:]}"
        checks.every_step_is_logged_once(self.run, self.steps, but_the_last=self.script == "mp")
        worst = checks.weights_equal(self.run, reference, self.flavours[flavour][1])
        shared = self.disk and len(self.disk.mounts) > 1
        checks.nothing_is_left(self.run if self.disk else self.run.parent, shared)
        rescues, count = checks.saves_and_rescues(self.run)
        self.notes.append({"flavour": flavour, "lives": count, "rescues": rescues, "difference": worst,
                           **counts})
        self.say(f"run {len(self.notes)} ({flavour}): {count} lives, {rescues} rescues, {counts}, weights "
                 f"differ by {worst}")
