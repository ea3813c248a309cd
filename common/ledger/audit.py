"""Compares the samples each step was trained on with the order of an undisturbed run."""
import functools
import re
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.ledger.account import lives_of, read, saved_step


def audit(*run_dirs: Path | str, explain: Callable[[str], Any] = lambda line: None) -> dict[str, Any]:
    """Return missed and repeated samples, lost and redone steps, of the lives that lead to the last step.

    Lost: a rank had done the step, but the next life resumed before it. Redone: each time a step was made
    again. Missed: the notes exist, but lack the sample. A step that lacks samples where a rank has no notes
    (a damaged line, a life without --audit, another node's folder) is listed in "unproven", if there is one.
    What is expected follows from (n, seed, global batch size), the data's groups or weights and the step's
    number, never from the notes.
    """
    folders = [Path(run_dir) / "audit" for run_dir in run_dirs]
    lives = lives_of(*run_dirs)
    if not any(path for folder in folders for path in folder.glob("life-*.jsonl")):
        raise UserError(f"{folders[0]} holds no audit\ntrain with --audit, which writes one")
    chain, makers, reached, lost, redone = _follow(folders, lives)
    if reached == 0:
        raise UserError(f"{folders[0]} holds no finished step\nthere is nothing to audit yet")
    first = lives[0][0]
    needed = ["n", "global_batch_size", "seed", *["epoch", "position"] * bool(first["step"])]
    if lacks := set(needed) - set(first):
        raise UserError(f"{run_dirs[0]}: the first life lacks {sorted(lacks)}, from which the order follows")
    found: dict[str, Any] = {"missed": 0, "repeated": 0, "lost": lost, "redone": redone}
    unproven, ids_of = [], _orders(folders, first["seed"])
    for step, epoch, batch, data in _planned([events[0] for events in lives], reached, explain):
        if step <= first["step"] and first.get("options", {}).get("fork"):
            continue  # a step of the run that this one has left
        expected = Counter(ids_of(*data, batch, epoch))
        trained = Counter(chain.get(step, ()))
        missed, repeated = (expected - trained).total(), (trained - expected).total()
        spans = next((spans for resumed, spans in reversed(makers) if resumed < step), [range(0)])
        if missed and not all(step in span for span in spans):
            unproven.append(step)
            missed = 0
        if missed or repeated:
            explain(f"step {step} (epoch {epoch}, position {batch.start}): "
                    f"missed {missed}, repeated {repeated}")
        found["missed"] += missed
        found["repeated"] += repeated
    return found | ({"unproven": unproven} if unproven else {})


def _follow(folders, lives):
    """Return {step: ids it was trained on}, (step resumed at, steps noted by each replica) of each life, the
    last step, and the numbers of steps lost and redone.
    """
    chain, executions, reached, lost, makers = {}, Counter(), 0, 0, []
    for events, following in zip(lives, [*lives[1:], None], strict=True):
        resumed = events[0]["step"]
        lost += max(0, reached - resumed)
        chain = {step: ids for step, ids in chain.items() if step <= resumed}
        begun, done, spans = _read_life(folders, events[0]["life"], events[0]["world"])
        ranks = range(0, events[0]["world"], events[0].get("stages", 1))
        makers.append((resumed, [spans.get(rank, range(0)) for rank in ranks]))
        for step, ids in begun.items():
            chain.setdefault(step, array("q")).extend(ids)
        # A process can die after its update and before its done-line, and a survivor can save that update: a
        # step that the next life resumed past was made too. Any other step without a done-line changed no
        # model.
        kept = following[0]["step"] if following else 0
        executions.update(done)
        executions.update(step for step in begun if resumed < step <= kept and step not in done)
        reached = max([saved_step(events), *done])
    return chain, makers, reached, lost, executions.total() - len(executions)


def _read_life(folders, life, world):
    """Return {step: ids any rank began}, {step: how often the busiest rank did it}, {rank: steps noted}."""
    begun, done, spans = {}, Counter(), {}
    for path in (path for folder in folders for path in folder.glob(f"life-{life}-rank*.jsonl")):
        name = re.fullmatch(r".+-rank(0|[1-9]\d*)\.jsonl", path.name)
        if not name or int(name[1]) >= world or not path.is_file():
            continue  # a copy that a person made, say
        own, steps, whole = Counter(), set(), True
        for record in read(path, torn={}):
            good = False
            with suppress(TypeError, OverflowError):  # damaged ids
                match record:
                    case {"event": "begin", "step": int(step), "ids": list(ids)}:
                        ids = array("q", ids)  # 8 bytes a sample: an audit may hold many
                        begun.setdefault(step, array("q")).extend(ids)
                        steps.add(step)
                        good = True
                    case {"event": "done", "step": int(step)} if steps & {step - 1, step}:
                        own[step] += 1
                        good = step in steps
            whole = whole and good
        done |= own  # the larger of both counts
        if steps:  # a damaged line may have told of any other step
            spans[int(name[1])] = range(min(steps), max(steps) + 1) if whole else steps
    return begun, done, spans


def _orders(folders, seed):
    """A function of (n, name of the order, positions, epoch) that returns ids."""
    import torch  # here: other reports do without it

    from common.sampler import Order

    @functools.cache
    def order(n, name):
        files = [path for folder in folders for path in folder.glob(f"order-{name}.jsonl")] if name else []
        facts = [record for path in files for record in read(path)] or [{}]
        if name and not facts[0]:
            raise UserError(f"{folders[0]} has no order-{name}.jsonl, from which the order follows\n"
                            "name the run folders of all machines")
        return Order(n, seed, facts[0].get("groups"), facts[0].get("weights"))

    return lambda n, name, at, epoch: order(n, name).ids(torch.arange(at.start, at.stop), epoch).tolist()


def _planned(lives, steps, explain):
    """Yield (step, epoch, positions, data) of each step of an undisturbed run; `lives` are the first events.

    `data` is (number of samples, name of their order). If a life found others than the life before, the epoch
    begins again. A run whose first steps come from another folder resumes where it was told to; earlier steps
    are expected as if made here.
    """
    first, changes = lives[0], {}
    data = first["n"], first.get("order", "")
    for life in lives:
        changes = {step: new for step, new in changes.items() if step <= life["step"]}  # others were undone
        last = [data, *changes.values()][-1]
        if (new := (life.get("n", last[0]), life.get("order", last[1]))) != last:
            changes.pop(life["step"], None)
            changes[life["step"]] = new
    batch, epoch, position = first["global_batch_size"], 0, 0
    for step in range(steps):
        if step == first["step"] > 0:
            epoch, position = first["epoch"], first["position"]
        if position >= data[0]:
            epoch, position = epoch + 1, 0
        if step in changes:
            data, position = changes[step], 0
            explain(f"after step {step}: epoch {epoch + 1} began again, with {data[0]:,} samples")
        yield step + 1, epoch, range(position, min(position + batch, data[0])), data
        position += batch
