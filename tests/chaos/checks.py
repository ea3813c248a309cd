"""What must hold after any schedule of faults; each returns or raises AssertionError with the facts."""

import collections
import contextlib
import io
import re

from jobs import audit, done_by_rank, events, lives, rows

HARD = ("KILL", "SEGV", "LOCK", "STOP")  # whoever gets these saves nothing any more


def checkpoints_are_whole(run, tries=1):
    """Every one that has a name that counts verifies, and there is one. A second look: one may just be let
    go.
    """
    from common.checkpoint.__main__ import main

    for _ in range(tries):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main([str(run)])
        # by a life that could not use it
        aside = [path.name for path in (run / "checkpoints").glob("damaged-*")]
        if code == 0 and "damaged" not in out.getvalue() and not aside:
            return
    raise AssertionError(f"{out.getvalue()}{aside}")


# steps, of one change of life
Change = collections.namedtuple("Change", "lost of_survivors survived facts")


def changes(run, struck):
    """What each change of life has cost: the steps that are made again, and a survivor's among them."""
    found = []
    all_lives = lives(run)
    for life, following in zip(all_lives, all_lives[1:], strict=False):
        done = done_by_rank(run, life["life"])
        survivors = [rank for rank, pid in enumerate(life["pids"]) if pid not in struck]
        lost = max(0, max(done.values(), default=0) - following["step"])
        of_survivors = max(0, max((done.get(rank, 0) for rank in survivors), default=0) - following["step"])
        found.append(
            Change(
                lost,
                of_survivors,
                bool(survivors),
                f"{life} -> {following}: done {done}, survivors {survivors}",
            )
        )
    return found


def little_is_lost(found, interval):
    for change in found:
        assert not change.of_survivors, f"a survivor's step is lost: {change.facts}"
        assert change.lost <= (1 if change.survived else 2 * interval), (
            f"more is lost than may be: {change.facts}"
        )


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
    from jobs import weights

    ours = weights(run)
    theirs = weights(reference)
    assert ours.keys() == theirs.keys(), f"weights differ in their names: {ours.keys() ^ theirs.keys()}"
    worst = max(float((tensor.double() - theirs[name].double()).abs().max()) for name, tensor in ours.items())
    assert worst <= (0 if bitwise else 1e-9), f"weights differ from the unbroken run's by {worst}"
    return worst


def digest(run):
    """The word that `python -m common.checkpoint RUN --digest` ends with."""
    from common.extras.chosen import choose

    return choose(run, "newest")[2].split()[-1]


def nothing_is_left(folder):
    left = [
        path
        for path in folder.rglob("*")
        if re.search(r"\.life-|\.gone$|\.new$|lock\.\d+$|damaged", str(path.relative_to(folder)))
    ]
    assert not left, left


def every_second_has_its_bucket(run, killed):
    """The buckets add up, most seconds have one with a name, and every killed rank is among the dead.

    Of a life that had ended well nobody misses a rank that is killed while it leaves.
    """
    from common.extras.report import summarize

    facts = summarize(run)
    buckets = facts["buckets"]
    wall = facts["wall_s"]
    assert wall == sum(buckets.values())
    # Each kill costs its life the seconds since its last entry: on a busy machine they are many.
    assert min(buckets.values()) >= 0 and buckets["other"] <= wall / 2, (buckets, wall)
    dead = {death["pid"] for death in facts["deaths"]}
    done = {event["life"] for event in events(run, "done")}
    for life in (life for life in facts["lives"][:-1] if life["life"] not in done):
        left = {life["pids"][event["rank"]] for event in events(run, "left") if event["life"] == life["life"]}
        missing = set(life["pids"]) & killed - dead - left
        assert not missing, f"no death is told of {missing}: {facts['deaths']}"
