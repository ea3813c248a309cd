"""Compares the samples each step was trained on with the order of an undisturbed run."""
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.ledger.account import Life, lives_of, saved_step
from common.ledger.ledger import read


def audit(*run_dirs: Path | str, explain: Callable[[str], Any] = lambda line: None) -> dict[str, Any]:
    """Return missed and repeated samples, lost and redone steps, of the lives that lead to the last step.

    Lost: a rank had done the step, but the next life resumed before it. Redone: each time a step was made
    again. Missed: all ranks have notes of the step, and they lack the sample. A step that lacks samples where
    a rank has no note (a torn line, a life without --audit, another node's folder) is listed in "unproven",
    if there is one. What is expected follows from (n, seed, global batch size) and the step's number, never
    from the notes.
    """
    from common.sampler import permute  # imports torch: other reports do without it

    folders = [Path(run_dir) / "audit" for run_dir in run_dirs]
    lives = lives_of(*run_dirs)
    history = History(folders)
    for events in lives:
        history.add(events)
    if not history.reached or not history.ids:
        raise UserError(f"{folders[0]} holds no audit of a finished step\ntrain with --audit")
    counts: dict[str, Any] = {"missed": 0, "repeated": 0, "lost": history.lost, "redone": history.redone()}
    unproven = []
    first = lives[0][0]
    plan = _planned([events[0] for events in lives], history.reached, explain)
    for step, epoch, positions, samples in plan:
        if step <= first["step"] and first.get("options", {}).get("fork"):
            continue  # a step of the run that this one has left
        trained = Counter(history.ids.get(step, ()))
        expected = Counter(permute(positions, samples, first["seed"], epoch).tolist())
        missed = (expected - trained).total()
        repeated = (trained - expected).total()
        if missed and not history.whole.get(step):
            unproven.append(step)
            missed = 0
        if missed or repeated:
            explain(f"step {step} (epoch {epoch + 1}, position {positions.start}): "
                    f"missed {missed}, repeated {repeated}")
        counts["missed"] += missed
        counts["repeated"] += repeated
    if unproven:
        counts["unproven"] = unproven
    return counts


class History:
    """What the lives that lead to the last step were trained on; add them in order."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.ids: dict[int, array] = {}     # of each step: the samples it was trained on
        self.whole: dict[int, bool] = {}    # and whether all ranks noted it
        self.made: Counter[int] = Counter()  # how often each step was made
        self.begun: set[int] = set()        # steps of the newest life that no rank noted as done
        self.reached = 0
        self.lost = 0

    def add(self, events: Life) -> None:
        life = events[0]
        resumed = life["step"]
        # A process can die after its update and before its done-line, and a survivor can save that update: a
        # step that the next life resumes past was made too. Any other step without a done-line changed no
        # model.
        self.made.update(step for step in self.begun if step <= resumed)
        self.lost += max(0, self.reached - resumed)
        for step in [step for step in self.ids if step > resumed]:
            del self.ids[step], self.whole[step]
        ranks_of: dict[int, set[int]] = {}
        done: Counter[int] = Counter()  # the busiest rank's
        for rank in range(life["world"]):
            notes = list(self._notes(f"life-{life['life']}-rank{rank}.jsonl"))
            for note in notes:
                if note["event"] == "begin":
                    ranks_of.setdefault(note["step"], set()).add(rank)
                    self.ids.setdefault(note["step"], array("q")).extend(note["ids"])  # 8 bytes a sample
            done |= Counter(note["step"] for note in notes if note["event"] == "done")
        for step, ranks in ranks_of.items():
            self.whole.setdefault(step, len(ranks) == life["world"] // life.get("stages", 1))
        self.made.update(done)
        self.begun = {step for step in ranks_of if step > resumed and step not in done}
        self.reached = max([saved_step(events), *done])

    def redone(self) -> int:
        return self.made.total() - len(self.made)

    def _notes(self, name):
        for folder in self.folders:
            if (folder / name).is_file():
                yield from read(folder / name)


def _planned(lives, steps, explain):
    """Yield (step, epoch, positions, samples) of each step of an undisturbed run; `lives` are first events.

    If a life found another number of samples than the life before, the epoch begins again. A run whose first
    steps come from another folder resumes where it was told to; earlier steps are expected as if made here.
    """
    first = lives[0]
    batch = first["global_batch_size"]
    samples = first["n"]
    changes = {}  # {step: the number of samples after it}
    for life in lives:
        changes = {step: new for step, new in changes.items() if step <= life["step"]}  # others were undone
        if life["n"] != [samples, *changes.values()][-1]:
            changes[life["step"]] = life["n"]
    epoch = 0
    position = 0
    for step in range(steps):
        if step == first["step"] > 0:
            epoch = first["epoch"]
            position = first["position"]
        if position >= samples:
            epoch += 1
            position = 0
        if step in changes:
            samples = changes[step]
            position = 0
            explain(f"after step {step}: epoch {epoch + 1} began again, with {samples:,} samples")
        yield step + 1, epoch, range(position, min(position + batch, samples)), samples
        position += batch
