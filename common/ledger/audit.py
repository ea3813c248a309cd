"""Which samples each step was really trained on, compared with the order that an undisturbed run would have
had.
"""
from array import array
from collections import Counter
from pathlib import Path

from common.errors import UserError
from common.ledger.report import _saved, lives_of, planned, read


def audit(*run_dirs, explain=lambda line: None):
    """Return missed and repeated samples, lost and redone steps, along the chain of lives that leads to the
    last step.

    Lost: done by somebody, and the next life resumed before it. Redone: each time a step was made beyond its
    first. Missed: the notes are there, the sample is not. A step that a rank has no notes around (a file that
    is gone, a life without --audit, another node's folder) and that lacks samples is in "unproven", a list
    that is there if it is not empty. The expectation comes from (n, seed, global batch size) and the step's
    number alone, never from the log itself.
    """
    from common.sampler import permute  # here, because it imports torch

    folders = [Path(run_dir) / "audit" for run_dir in run_dirs]
    lives = lives_of(*run_dirs)
    if not any(path for folder in folders for path in folder.glob("life-*.jsonl")):
        raise UserError(f"{folders[0]} holds no audit\ntrain with --audit to have one written")
    # chain: step -> ids it was trained on, in this lineage
    chain, executions, reached, lost = {}, Counter(), 0, 0
    makers = []
    for events, following in zip(lives, [*lives[1:], None], strict=True):
        resumed = events[0]["step"]
        lost += max(0, reached - resumed)
        chain = {step: ids for step, ids in chain.items() if step <= resumed}
        begun, done, spans = _read_life(folders, events[0]["life"])
        ranks = range(0, events[0]["world"], events[0].get("stages", 1))
        makers.append((resumed, [spans.get(rank, range(0)) for rank in ranks]))
        for step, ids in begun.items():
            chain.setdefault(step, array("q")).extend(ids)
        # A process can die after its update and before its done-line, and a survivor save that very update:
        # what the
        # next life resumed past was made too. Any other step begun and not done has left no trace in the
        # model.
        kept = following[0]["step"] if following else 0
        executions.update(done)
        executions.update(step for step in begun if resumed < step <= kept and step not in done)
        reached = max([_saved(events), *done])
    if reached == 0:
        raise UserError(f"{folders[0]} tells of no finished step\nthere is nothing to audit yet")

    first = lives[0][0]
    if lacks := {"n", "global_batch_size", "seed"} - set(first):
        raise UserError(f"{run_dirs[0]}: the first life lacks {sorted(lacks)}, without which there is no order")
    found = {"missed": 0, "repeated": 0, "lost": lost, "redone": executions.total() - len(executions)}
    for step, epoch, batch, n in planned([events[0] for events in lives], reached, explain):
        position = batch.start
        expected = Counter(permute(batch, n, first["seed"], epoch).tolist())
        trained = Counter(chain.get(step, ()))
        missed, repeated = (expected - trained).total(), (trained - expected).total()
        spans = next((spans for resumed, spans in reversed(makers) if resumed < step), [range(0)])
        if missed and not all(step in span for span in spans):
            found.setdefault("unproven", []).append(step)
            missed = 0
        if missed or repeated:
            explain(f"step {step} (epoch {epoch}, position {position}): missed {missed}, repeated {repeated}")
        found["missed"] += missed
        found["repeated"] += repeated
    return found


def _read_life(folders, life):
    """Return {step: ids that any rank began to train on}, {step: how often the busiest rank has done it},
    {rank: steps noted}.
    """
    begun, done, spans = {}, Counter(), {}
    for path in sorted(path for folder in folders for path in folder.glob(f"life-{life}-rank*.jsonl")):
        own, steps = Counter(), []
        for record in read(path):
            match record:
                case {"event": "begin", "step": int(step), "ids": list(ids)}:
                    # 8 bytes a sample: an audit may hold a great many
                    begun.setdefault(step, array("q")).extend(ids)
                    steps.append(step)
                case {"event": "done", "step": int(step)}:
                    own[step] += 1
                    steps.append(step)
        done |= own  # the larger of both counts
        if steps:
            spans[int(path.stem.rpartition("rank")[2])] = range(min(steps), max(steps) + 1)
    return begun, done, spans
