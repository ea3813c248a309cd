"""What must hold after any schedule of faults; each returns or raises AssertionError with the facts."""

import collections
import contextlib
import io
import re

from jobs import audit, done_by_rank, lives, rows, weights

HARD = ("KILL", "SEGV", "LOCK", "STOP")  # whoever gets these saves nothing any more


def checkpoints_are_whole(run, tries=1):
    """Every one that has a name that counts verifies, and there is one. A second look: one may just be let
    go.
    """
    from common.extras.exports import main

    for _ in range(tries):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main([str(run)])
        # by a life that could not use it
        aside = [path.name for path in (run / "checkpoints").glob("damaged-*")]
        if code == 0 and "damaged" not in out.getvalue() and not aside:
            return
    raise AssertionError(f"{out.getvalue()}{aside}")


Change = collections.namedtuple("Change", "lost of_survivors survived")  # steps, of one change of life


def changes(run, struck, interval):
    """What each change of life has cost: the steps that are made again, and a survivor's among them."""
    found = []
    all_lives = lives(run)
    for life, following in zip(all_lives, all_lives[1:], strict=False):
        done = done_by_rank(run, life["life"])
        survivors = [rank for rank, pid in enumerate(life["pids"]) if pid not in struck]
        lost = max(0, max(done.values(), default=0) - following["step"])
        of_survivors = max(0, max((done.get(rank, 0) for rank in survivors), default=0) - following["step"])
        facts = f"{life} -> {following}: done {done}, survivors {survivors}"
        assert not of_survivors, f"a survivor's step is lost: {facts}"
        assert lost <= (1 if survivors else 2 * interval), f"more is lost than may be: {facts}"
        found.append(Change(lost, of_survivors, bool(survivors)))
    return found


def samples_are_exact(run):
    counts = audit(run)
    assert counts["missed"] == counts["repeated"] == 0 and not counts.get("unproven"), counts
    return counts


def every_step_is_logged_once(run, last):
    lines = rows(run)
    steps = [line["step"] for line in lines if "val_loss" not in line]
    assert steps == list(range(1, last + 1))
    evaluations = [line["step"] for line in lines if "val_loss" in line]
    assert evaluations == sorted(set(evaluations)) and last in evaluations, evaluations


def weights_equal(run, reference, bitwise):
    ours = weights(run)
    theirs = weights(reference)
    assert ours.keys() == theirs.keys(), f"weights differ in their names: {ours.keys() ^ theirs.keys()}"
    worst = max(float((tensor.double() - theirs[name].double()).abs().max()) for name, tensor in ours.items())
    assert worst <= (0 if bitwise else 1e-9), f"weights differ from the unbroken run's by {worst}"
    return worst


def nothing_is_left(folder):
    pattern = re.compile(r"\.life-|\.gone$|\.new$|lock\.\d+$|damaged")
    left = [path for path in folder.rglob("*") if pattern.search(str(path.relative_to(folder)))]
    assert not left, left
