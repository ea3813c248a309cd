"""Launches, waits for the training to go on, and checks; the run folder's own records say what was lost."""

import collections
import tempfile
import time
from pathlib import Path

from jobs import PACED, TESTS, digest, lives, reached, steps_on_disk, until

from tests.chaos import EPOCH, HANG, RECOVERY, checks, events, points_names
from tests.chaos.cluster import Cluster
from tests.chaos.strikes import Strikes

INTERVAL = 7  # steps between saves
COMMON = (
    f"--save-every={INTERVAL}",
    "--save-seconds=0",
    "--keep=2",
    f"--hang-timeout={HANG}",
    "--check-every=25",
    "--audit",
    "--no-tensorboard",
    "--log-every=1",
    "--global-batch-size=32",
)
BITWISE = "--virtual-ranks=8"  # any world gives the same bits; without it, and without dropout, 1e-9
MODEL, DATA = PACED[:2]
FILES = (MODEL, f"--dataset={TESTS}/paced.py:files", "--lr=0.01")
DEVICES = (MODEL, DATA, "--devices=cpu,cpu", "--lr=0.01")
DROPPING = f"--model={TESTS}/paced.py:dropping"
FLAVOURS = {
    "plain": (*FILES, "--workers=2"),
    "bitwise": (DROPPING, DATA, BITWISE, "--ema-decay=0.9", "--optimizer=adamw"),
}
UNLOADED = {"plain": (*FILES, "--workers=0")}  # fewer processes, where none that loads is struck
STAGES = {  # the same of train_mp.py
    "stages": (*DEVICES, "--micro-batch-size=8", "--check-every=7"),
    "stages, bitwise": (*DEVICES, BITWISE),
}
LOADING = {"loader", "stall"}


class Campaign(Strikes):
    """Trainings one after the other, until all events have struck.

    `only`: the targets of events; `env` is that of the workers.
    """

    def __init__(self, jobs, rng, count, short=False, epochs=20, script="ddp", only=(), **env):
        self.jobs = jobs
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=jobs.folder))
        self.rng = rng
        self.epochs = epochs
        self.script = script
        self.only = only
        self.env = env | {"CHAOS_SCRIPT": script}
        self.flavours = STAGES if script == "mp" else FLAVOURS
        if only and {*only} <= LOADING:  # one flavour has such processes
            self.flavours = {"plain": FLAVOURS["plain"]}
        self.patience = 60  # seconds: the workers of a dead agent save and leave
        self.todo = events.schedule(rng, count, points_names(), short, only)
        self.size = None
        # of the first clusters; then as the dice fall. Under a store each event costs seconds.
        self.kinds = ["plain", "store", *["plain"] * 9] if short else []
        self.steps = epochs * EPOCH
        self.pace = "0.008"
        if "bunch" in only:  # each takes seconds
            self.kinds = ["launcher"] * count
            self.flavours = UNLOADED
            self.pace = "0.2"
        self.references = {}
        self.tally = collections.Counter()
        self.log = []
        self.changes = []
        self.notes = []
        self.recovered = []  # seconds from a fault to the next step

    # ---- one training after the other -------------------------------------------------------------
    def go(self):
        while self.todo:
            names = list(self.flavours)
            self.train(names[len(self.notes) % len(names)])

    def flags(self, run, flavour):
        return [f"--run-dir={run}", f"--epochs={self.epochs}", *COMMON, *self.flavours[flavour]]

    def reference(self, flavour):
        """The same run, undisturbed; once."""
        if flavour not in self.references:
            run = self.folder / f"reference-{flavour}"
            self.jobs.torchrun(
                2 if self.script == "mp" else 1,
                f"train_{self.script}.py",
                *self.flags(run, flavour),
                PACE="0",
            ).ends_with(0)
            self.references[flavour] = run
        return self.references[flavour]

    def train(self, flavour):
        """One training from its first step to its last, struck all along."""
        folder = self.folder / f"run-{len(self.notes)}"
        self.armed = folder / "armed"
        self.armed.mkdir(parents=True)
        self.journal = folder / "journal"
        self.run = folder / "run"
        self.flavour = flavour
        self.struck = []
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
                if flavour != "plain" and event.target in LOADING:
                    event = event._replace(target="worker", signal="KILL")  # its samples are in memory
                self.strike(event)
                if steps_on_disk(self.run):
                    checks.checkpoints_are_whole(self.run, tries=3)
            elif not self.cluster.ended():
                self.await_end()
        self.cluster.close()
        self.check(reference)

    def await_end(self):
        """The agents' own end; ours for those that wait for each other after the last step.

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
            self.kinds.insert(0, "plain")  # what follows has no other agent to wait for
            self.cluster.strike([agent.pid for agent in self.cluster.living], "KILL")
            self.until(self.cluster.ended, "the agents to end", 60)

    def launch(self):
        points = {"CHAOS_ARMED": str(self.armed), "CHAOS_JOURNAL": str(self.journal)}
        kind = self.kinds.pop(0) if self.kinds else self.rng.choice(["plain", "store"])
        self.cluster = Cluster(
            self.jobs,
            self.rng,
            self.flags(self.run, self.flavour),
            self.env | points | {"PACE": self.pace},
            kind,
            self.size,
        )
        self.tally[f"cluster {kind}"] += 1

    def relaunch(self):
        codes = self.cluster.finish(60)
        self.cluster.await_orphans(self.patience)
        self.struck += self.cluster.signalled
        assert 0 not in codes or self.step_on_disk() == self.steps, (
            f"an agent left with 0 before the end\n{self.outputs()}"
        )
        self.launch()
        self.settle(len(lives(self.run)))

    # ---- where it is ------------------------------------------------------------------------------
    def step(self):
        return reached(self.run)

    def step_on_disk(self):
        return max(steps_on_disk(self.run), default=-1)

    def over(self):
        """Nothing more happens by itself: the submission has ended, or the last step is on the disk."""
        return self.cluster.ended() or self.step_on_disk() == self.steps

    def done(self):
        """The last submission has ended by itself; after one that we ended, the next finds nothing to do."""
        codes = [agent.poll() for agent in self.cluster.agents]
        return self.cluster.ended() and 0 in codes and self.step_on_disk() == self.steps

    def outputs(self):
        return "\n".join(agent.output[-3000:] for agent in self.cluster.agents)

    def advance(self, steps):
        """Whether the training has made so many steps more and is not over, at a random moment of a step."""
        goal = min(self.step() + steps, self.steps)
        self.until(lambda: self.over() or lives(self.run) and self.step() >= goal, "steps")
        time.sleep(self.rng.random() * 2 * float(self.pace))
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
            if self.over() or len(lives(self.run)) == before:
                return self.over()
            first = lives(self.run)[-1]["step"]
            return self.step() > first or first == self.steps

        self.until(there, "training to go on")
        return time.monotonic() - began

    # ---- the end of a run -------------------------------------------------------------------------
    def check(self, reference):
        until(lambda: not self.jobs.alive(), "every process to end", self.patience)
        journal = self.journaled()
        self.tally.update(f"at {line['point']}" for line in journal)
        struck = self.struck + self.cluster.signalled + journal
        hard = {line["pid"] for line in struck if line["signal"] in checks.HARD}
        self.changes += checks.changes(self.run, hard, INTERVAL)
        counts = checks.samples_are_exact(self.run)
        checks.checkpoints_are_whole(self.run)
        said = self.outputs()
        assert "trying the one before" not in said, f"a kill has left a damaged checkpoint\n{said}"
        checks.every_step_is_logged_once(self.run, self.steps)
        bitwise = BITWISE in self.flavours[self.flavour]
        worst = checks.weights_equal(self.run, reference, bitwise)
        checks.nothing_is_left(self.run.parent)
        note = {"flavour": self.flavour, "lives": len(lives(self.run)), "difference": worst, **counts}
        if bitwise:
            note["digest"] = digest(self.run)
        self.notes.append(note)
        print(f"run {len(self.notes)}: {note}", flush=True)
