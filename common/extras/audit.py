"""Whether each sample was used once: what was trained on, beside what should have been.

From the notes of --audit to four numbers: `_follow` finds which life has made each step; `planned` says what
an undisturbed run would have used, from (n, seed, global batch size) alone; both are compared.
"""

from array import array
from collections import Counter, defaultdict
from functools import partial

from common.errors import UserError
from common.extras.lives import lives_of, read
from common.ledger import Lines, named


class Audit:
    """What one rank trained on in one life: begin() before gradients are exchanged, done() after the update.

    When one rank has finished a step, all ranks had begun it: the samples of dead ranks are on disk too.
    """

    def __init__(self, run_dir, life, rank):
        self.lines = Lines(run_dir / "audit" / life / f"rank{rank}.jsonl")

    def begin(self, step, ids):
        self.lines.append({"event": "begin", "step": step, "ids": ids})

    def done(self, step):
        """Note the newest whole step: a GPU may end it late, and then it is noted twice."""
        self.lines.append({"event": "done", "step": step})


def audit(*run_dirs):
    """Return missed and repeated samples, lost and redone steps, of the lives that lead to the last step.

    Lost: a rank had done the step, but the next life resumed before it. Redone: each time a step was made
    again. Missed: all ranks have notes of the step, and they lack the sample. A step that lacks samples where
    a rank has no note (a torn line, a life without --audit, another node's folder) is listed in "unproven",
    if there is one; steps with wrong samples are in "wrong". What is expected follows from (n, seed, global
    batch size) and the step's number, never from the notes.
    """
    from common.sampler import permute  # imports torch: other reports do without it

    lives = lives_of(*run_dirs)
    ids, whole, reached, counts = _follow(lives, [run_dir / "audit" for run_dir in run_dirs])
    if not reached or not ids:
        raise UserError(
            f"{run_dirs[0]} holds no audit of a finished step\ntrain with --audit, or Elastic(audit=True)"
        )
    for step, epoch, positions, samples in planned([life for life, *_ in lives], reached):
        trained = Counter(ids.get(step, ()))
        expected = Counter(permute(positions, samples, lives[0][0]["seed"], epoch).tolist())
        missed = (expected - trained).total()
        repeated = (trained - expected).total()
        if missed and step not in whole:
            counts.setdefault("unproven", []).append(step)
            missed = 0
        if missed or repeated:
            counts.setdefault("wrong", []).append(step)
        counts["missed"] += missed
        counts["repeated"] += repeated
    return counts


def _follow(lives, folders):
    """Return {step: the samples it was trained on}, the steps that all ranks noted, the last step, counts.

    A step that a later life has made again counts as that life made it.
    """
    ids = defaultdict(partial(array, "q"))  # 8 bytes a sample
    whole = set()
    made = Counter()  # how often each step was made
    reached = 0
    lost = 0
    for number, events in enumerate(lives):
        life = events[0]
        resumed = life["step"]
        lost += max(0, reached - resumed)
        for step in [step for step in ids if step > resumed]:
            del ids[step]
            whole.discard(step)
        ranks = Counter()  # that noted each step
        ends = [event["step"] for event in named(events, "life", "save", "rescue")]
        for note in _notes_of(life, folders):
            step = note["step"]
            if note["event"] == "done":
                ends.append(step)
            else:
                ranks[step] += 1
                ids[step].extend(note["ids"])
        whole.update(step for step in ranks if ranks[step] >= life["world"])
        if events is not lives[-1]:
            # A process can die after its update and before its done-line, and a survivor can save that
            # update: a step that the next life resumes past was made too. Any other changed no model.
            ends += [step for step in ranks if step <= lives[number + 1][0]["step"]]
        reached = max(ends)
        made.update(range(resumed + 1, reached + 1))
    counts = {"missed": 0, "repeated": 0, "lost": lost, "redone": made.total() - len(made)}
    return ids, whole, reached, counts


def _notes_of(life, folders):
    for rank in range(life["world"]):
        for folder in folders:
            for note in read(folder / life["life"] / f"rank{rank}.jsonl", "step"):
                if note.get("event") == "done" or {"event", "ids"} <= note.keys():
                    yield note


def planned(lives, last):
    """Yield (step, epoch, positions, samples) of each step of an undisturbed run; `lives` are first events.

    If a life found another number of samples than the life before, the epoch begins again.
    """
    first = lives[0]
    samples = first["n"]
    epoch = first["epoch"]
    position = first["position"]
    turns = first.get("turns", 1)  # steps with each batch
    turn = first.get("turn", 0)
    sizes = {}  # {step: the number of samples after it}
    for life in lives:
        while sizes and next(reversed(sizes)) >= life["step"]:  # it was undone
            sizes.popitem()
        sizes[life["step"]] = life["n"]
    for step in range(first["step"], last):
        if position >= samples:
            epoch += 1
            position = 0
        if sizes.get(step, samples) != samples:
            samples = sizes[step]
            position = turn = 0
        batch = range(position, min(position + first["global_batch_size"], samples))
        yield step + 1, epoch, batch, samples
        turn = (turn + 1) % turns
        position = position if turn else batch.stop
