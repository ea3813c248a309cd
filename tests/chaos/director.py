"""Launches, waits for the training to go on, and checks; the run folder's own records say what was lost."""

import collections
import functools
import tempfile
import time
from pathlib import Path

from jobs import PACED, TESTS, lives, reached, steps_on_disk, until

from tests.chaos import EPOCH, HANG, RECOVERY, checks, events, points_names
from tests.chaos.cluster import Cluster
from tests.chaos.strikes import Strikes

INTERVAL = 7  # steps between saves
COMMON = [
    f"--save-every={INTERVAL}",
    "--save-seconds=0",
    "--keep=2",
    f"--hang-timeout={HANG}",
    "--check-every=25",
    "--audit",
    "--no-tensorboard",
    "--log-every=1",
    "--global-batch-size=32",
]
FLAVOURS = {  # name: (flags, whether any world gives the same bits)
    # no dropout: 1e-9
    "plain": ([PACED[0], f"--dataset={TESTS}/paced.py:files", "--workers=2", "--lr=0.01"], False),
    "bitwise": (
        [
            f"--model={TESTS}/paced.py:dropping",
            PACED[1],
            "--virtual-ranks=8",
            "--ema-decay=0.9",
            "--optimizer=adamw",
        ],
        True,
    ),
}
# Fewer processes, where none that loads is struck.
UNLOADED = {"plain": ([*FLAVOURS["plain"][0], "--workers=0"], False)}
DEEP = [f"--model={TESTS}/paced.py:deep", PACED[1], "--devices=cpu,cpu", "--lr=0.01"]
STAGES = {  # the same of train_mp.py
    "stages": ([*DEEP, "--micro-batch-size=8", "--check-every=7"], False),
    "stages, bitwise": ([*DEEP, "--virtual-ranks=8"], True),
}
LOADING = {"loader", "stall"}


class Campaign(Strikes):
    """Trainings one after the other, until all events have struck.

    `only`: the targets of events; `env` is that of the workers.
    """

    def __init__(
        self,
        jobs,
        rng,
        count,
        short=False,
        cold=0.0,
        epochs=20,
        say=print,
        script="ddp",
        only=(),
        **env,
    ):
        self.jobs = jobs
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=jobs.folder))
        self.rng = rng
        self.cold = cold
        self.epochs = epochs
        self.say = functools.partial(say, flush=True)
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
        self.recovered = []
        self.missed = []
        self.orphaned = []

    # ---- one training after the other -------------------------------------------------------------
    def go(self):
        while self.todo:
            names = list(self.flavours)
            self.train(names[len(self.notes) % len(names)])

    def flags(self, run, flavour):
        return [f"--run-dir={run}", f"--epochs={self.epochs}", *COMMON, *self.flavours[flavour][0]]

    def reference(self, flavour):
        """The same run, undisturbed; once."""
        if flavour not in self.references:
            run = self.folder / f"reference-{flavour}"
            start = functools.partial(self.jobs.torchrun, 2) if self.script == "mp" else self.jobs.python
            job = start(f"train_{self.script}.py", *self.flags(run, flavour), PACE="0")
            assert job.wait(600) == 0, job.output
            self.references[flavour] = run
        return self.references[flavour]

    def train(self, flavour):
        """One training from its first step to its last, struck all along."""
        folder = self.folder / f"run-{len(self.notes)}"
        self.armed = folder / "armed"
        self.armed.mkdir(parents=True)
        self.journal = folder / "journal"
        self.run = folder / "run"
        self.now = self.flags(self.run, flavour)
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
                if any((self.run / "checkpoints").glob("step-*")):
                    checks.checkpoints_are_whole(self.run, tries=3)
            elif not self.cluster.ended():
                self.await_end()
        self.cluster.close()
        self.check(flavour, reference)

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
            self.cluster.cut = True
            self.kinds.insert(0, "plain")  # what follows has no other agent to wait for
            self.cluster.strike([agent.pid for agent in self.cluster.living], "KILL")
            self.until(self.cluster.ended, "the agents to end", 60)

    def launch(self):
        env = self.env | {
            "CHAOS_ARMED": str(self.armed),
            "CHAOS_JOURNAL": str(self.journal),
            "PACE": self.pace,
        }
        self.cluster = Cluster(
            self.jobs,
            self.rng,
            self.now,
            env,
            cold=self.rng.random() < self.cold,
            kind=self.kinds.pop(0) if self.kinds else None,
            size=self.size,
        )
        self.tally[f"cluster {self.cluster.kind}"] += 1

    def relaunch(self):
        codes = self.cluster.finish(60)
        self.orphaned.append(self.cluster.orphans(self.patience))
        self.struck += self.cluster.signalled
        assert 0 not in codes or self.step_on_disk() == self.steps, (
            f"an agent left with 0 before the end\n{self.outputs()}"
        )
        self.launch()
        self.settle(len(lives(self.run)))

    # ---- where it is ------------------------------------------------------------------------------
    def step(self):
        return reached(self.run) if lives(self.run) else 0

    def step_on_disk(self):
        return max(steps_on_disk(self.run), default=-1)

    def over(self):
        """Nothing more happens by itself: the submission has ended, or the last step is on the disk."""
        return self.cluster.ended() or self.step_on_disk() == self.steps

    def done(self):
        """The last submission has ended by itself; after one that was cut, the next finds nothing to do."""
        ended = not self.cluster.cut and 0 in [agent.poll() for agent in self.cluster.agents]
        return self.cluster.ended() and ended and self.step_on_disk() == self.steps

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
            found = lives(self.run)[before:]
            return (
                self.over() or found and (self.step() > found[-1]["step"] or found[-1]["step"] == self.steps)
            )

        self.until(there, "training to go on")
        return time.monotonic() - began

    # ---- the end of a run -------------------------------------------------------------------------
    def check(self, flavour, reference):
        until(lambda: not self.jobs.alive(), "every process to end", self.patience)
        self.struck += self.cluster.signalled
        journal = self.journaled()
        self.tally.update(f"at {line['point']}" for line in journal)
        struck = self.struck + journal
        hard = {line["pid"] for line in struck if line["signal"] in checks.HARD}
        killed = {line["pid"] for line in struck if line["signal"] in ("KILL", "SEGV")}
        self.changes += checks.changes(self.run, hard)
        checks.little_is_lost(self.changes, INTERVAL)
        checks.every_second_has_its_bucket(self.run, killed)
        counts = checks.samples_are_exact(self.run)
        checks.checkpoints_are_whole(self.run)
        said = self.outputs()
        assert "trying the one before" not in said, f"a kill has left a damaged checkpoint\n{said}"
        checks.every_step_is_logged_once(self.run, self.steps)
        bitwise = self.flavours[flavour][1]
        worst = checks.weights_equal(self.run, reference, bitwise)
        checks.nothing_is_left(self.run.parent)
        note = {"flavour": flavour, "lives": len(lives(self.run)), "difference": worst, **counts}
        if bitwise:
            note["digest"] = checks.digest(self.run)
        self.notes.append(note)
        self.say(f"run {len(self.notes)}: {self.notes[-1]}")
