"""Accounts for a run from what its lives have left: how it is now, who died of what, where each second went,
and whether each sample was used once. No torch here, but for the audit.
"""

import math
import socket
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from common.errors import UserError
from common.ledger.ledger import Record, read
from common.place import end_of

STEPPING = ("data_wait", "steps", "evaluation", "save_stall")  # as Clock names them
BUCKETS = ("down", "start", *STEPPING, "redone", "rescue", "other")

Life = list[Record]  # its events in order; the first is named "life"


def lives_of(*run_dirs: Path | str) -> list[Life]:
    """Return the lives in order. Nodes with a run folder of their own each hold a part: merged by time."""
    paths = [Path(run_dir) / "ledger.jsonl" for run_dir in run_dirs]
    events = [event for path in paths if path.is_file() for event in read(path)]
    if len(paths) > 1:
        events.sort(key=itemgetter("t"))
    lives: list[Life] = []
    for event in events:
        if event["event"] == "life":
            lives.append([])
        if lives:
            lives[-1].append(event)
    if not lives:
        raise UserError(f"{paths[0]} holds no life\nname the folder of a run that has begun training")
    return lives


def own(events: Life, *names: str) -> Life:
    """The events of these names, and of this very life: a process may write after the next one has begun."""
    life = events[0]["life"]
    return [event for event in events if event["event"] in names and event.get("life", life) == life]


def all_of(lives: list[Life], *names: str) -> Life:
    return [event for events in lives for event in own(events, *names)]


# ---- deaths ---------------------------------------------------------------------------------------
def deaths_of(events: Life, over: bool) -> list[Record]:
    """Return a dict per process that died, in their order: life, t, rank, host, pid, cause.

    A process has died if it was killed, if it noted an error, or if its life is over and it has not noted
    that it left.
    """
    life = events[0]
    left = {event["rank"] for event in own(events, "left")}
    causes: dict[int, str] = {}
    for note in own(events, "error", "death"):
        if note["event"] == "error" or note["rank"] not in left:
            causes.setdefault(note["rank"], note["why"])
    if over and not own(events, "done"):
        for rank in range(life["world"]):
            if rank not in left:
                causes.setdefault(rank, "ended without a word (killed, or its machine is gone)")
    return [
        {
            "life": life["life"],
            "rank": rank,
            "host": life["hosts"][rank],
            "pid": life["pids"][rank],
            "cause": cause,
        }
        for rank, cause in causes.items()
    ]


def life_before(run_dir: Path | str, job: str) -> tuple[Life, str, int]:
    """The newest life, if it is of this job, and who died in it; and the newest step that was saved.

    Call it before a new life is noted.
    """
    try:
        lives = lives_of(run_dir)
        last = lives[-1] if lives[-1][0]["job"] == job else []
        saved = max(event["step"] for event in all_of(lives, "life", "save", "rescue"))
        return last, _in_words(last), saved
    except Exception:  # there is none yet, or it is damaged: a log stops no training
        return [], "", 0


def _in_words(events):
    deaths = deaths_of(events, over=True) if events else []
    if not deaths:
        return ""
    words = "rank {rank} (pid {pid}) {cause}".format(**deaths[0])
    if len(deaths) > 1:
        words += f" and {len(deaths) - 1} more"
    for rescue in own(events, "rescue")[-1:]:
        words += f"; step {rescue['step']} saved by rank {rescue['rank']}"
    return words


# ---- seconds --------------------------------------------------------------------------------------
def account(lives: list[Life]) -> Iterator[dict[str, float]]:
    """Yield {bucket: seconds} of each life, from the end of the life before; together they are the wall time.

    Rank 0 has measured what lies between its first step and its last entry. The rest is "other".
    """
    accounted = lives[0][0]["began"]  # up to this moment
    for number, events in enumerate(lives):
        life = events[0]
        began = max(accounted, life["began"])
        opened = max(began, own(events, "life", "first_step")[-1]["t"])
        end = max(event["t"] for event in events if event.get("life", life["life"]) == life["life"])
        end = max(end, opened)
        kept = min((other[0]["step"] for other in lives[number + 1 :]), default=math.inf)
        claims = dict.fromkeys(BUCKETS, 0.0) | {"down": began - accounted, "start": opened - began}
        for entry in own(events, "steps"):
            for bucket in STEPPING:
                lost = bucket == "steps" and entry["step"] > kept  # a later life makes these steps again
                claims["redone" if lost else bucket] += entry.get(f"{bucket}_s", 0.0)
        for event in own(events, "left"):
            claims["rescue"] = end - event["stepped"]
        # In order, each gets at most what is left: no second is in two buckets.
        left = end - accounted
        for bucket, claim in claims.items():
            claims[bucket] = min(left, max(0.0, claim))
            left -= claims[bucket]
        claims["other"] = left
        yield claims
        accounted = end


def summarize(*run_dirs: Path | str) -> Record:
    """Return how the run is now, its lives, deaths, saves, rescues, buckets, and goodput.

    The buckets add up to `wall_s`. Goodput is the share of the time in steps that the newest life builds on.
    """
    lives = lives_of(*run_dirs)
    summaries = []
    for events, seconds in zip(lives, account(lives), strict=True):
        reached = max(event["step"] for event in own(events, "life", "save", "rescue", "steps"))
        summaries.append(events[0] | {"reached": reached, "buckets": seconds})
    buckets = {name: sum(life["buckets"][name] for life in summaries) for name in BUCKETS}
    wall = sum(buckets.values())
    return {
        "now": now(lives),
        "lives": summaries,
        "deaths": [death for events in lives for death in deaths_of(events, over=events is not lives[-1])],
        "saves": all_of(lives, "save"),
        "rescues": all_of(lives, "rescue"),
        "buckets": buckets,
        "wall_s": wall,
        "goodput": buckets["steps"] / max(wall, 1e-9),
    }


def now(lives: list[Life]) -> Record:
    """How the run is: state, step, rate, ages of the last step and save, pids of its ranks, how many live.

    The ledger hears of a step at most ten seconds late. Processes of another machine cannot be seen.
    """
    life = lives[-1][0]
    entries = own(lives[-1], "life", "steps")
    last = entries[-1]
    before = next((entry for entry in reversed(entries) if entry["step"] < last["step"]), last)
    save = [lives[0][0], *all_of(lives, "save", "rescue")][-1]  # what a run begins with is as good as saved
    host = socket.gethostname()
    here = [pid for rank, pid in enumerate(life["pids"]) if life["hosts"][rank] == host]
    alive = [pid for pid in here if end_of(pid) is None]
    state = "training" if alive or len(here) < life["world"] else "dead"
    for end in own(lives[-1], "stop", "done"):
        state = end["event"]
    return {
        "state": state,
        "step": last["step"],
        "last_step_s": time.time() - last["t"],
        "steps_per_s": (last["step"] - before["step"]) / max(1e-3, last["t"] - before["t"]),
        "saved": save["step"],
        "last_save_s": time.time() - save["t"],
        "pids": life["pids"],
        "alive": len(alive),
    }


# ---- samples --------------------------------------------------------------------------------------
def audit(*run_dirs: Path | str) -> Record:
    """Return missed and repeated samples, lost and redone steps, of the lives that lead to the last step.

    Lost: a rank had done the step, but the next life resumed before it. Redone: each time a step was made
    again. Missed: all ranks have notes of the step, and they lack the sample. A step that lacks samples where
    a rank has no note (a torn line, a life without --audit, another node's folder) is listed in "unproven",
    if there is one; steps with wrong samples are in "wrong". What is expected follows from (n, seed, global
    batch size) and the step's number, never from the notes.
    """
    from common.sampler import permute  # imports torch: other reports do without it

    lives = lives_of(*run_dirs)
    ids, whole, reached, counts = _follow(lives, [Path(run_dir) / "audit" for run_dir in run_dirs])
    if not reached or not ids:
        raise UserError(f"{run_dirs[0]} holds no audit of a finished step\ntrain with --audit")
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
    ids: dict[int, array] = {}
    whole = set()
    made: Counter[int] = Counter()  # how often each step was made
    begun = set()  # steps of the newest life that no rank noted as done
    reached = 0
    lost = 0
    for events in lives:
        life = events[0]
        resumed = life["step"]
        # A process can die after its update and before its done-line, and a survivor can save that update: a
        # step that the next life resumes past was made too. Any other step without a done-line changed no
        # model.
        made.update(step for step in begun if step <= resumed)
        lost += max(0, reached - resumed)
        for step in [step for step in ids if step > resumed]:
            del ids[step]
            whole.discard(step)
        ranks: Counter[int] = Counter()  # that noted each step
        done = set()
        paths = [
            folder / f"life-{life['life']}-rank{rank}.jsonl"
            for rank in range(life["world"])
            for folder in folders
        ]
        for note in (note for path in paths if path.is_file() for note in read(path)):
            step = note["step"]
            if note["event"] == "done":
                done.add(step)
            else:
                ranks[step] += 1
                ids.setdefault(step, array("q")).extend(note["ids"])  # 8 bytes a sample
        whole.update(step for step in ranks if ranks[step] >= life["world"] // life["stages"])
        made.update(done)
        begun = {step for step in ranks if step > resumed and step not in done}
        reached = max([event["step"] for event in own(events, "life", "save", "rescue")] + [*done])
    counts = {"missed": 0, "repeated": 0, "lost": lost, "redone": made.total() - len(made)}
    return ids, whole, reached, counts


def planned(lives: list[Record], last: int) -> Iterator[tuple[int, int, range, int]]:
    """Yield (step, epoch, positions, samples) of each step of an undisturbed run; `lives` are first events.

    If a life found another number of samples than the life before, the epoch begins again.
    """
    first = lives[0]
    samples = first["n"]
    epoch = first["epoch"]
    position = first["position"]
    changes: dict[int, int] = {}  # {step: the number of samples after it}
    for life in lives:
        changes = {step: new for step, new in changes.items() if step <= life["step"]}  # others were undone
        if life["n"] != [samples, *changes.values()][-1]:
            changes[life["step"]] = life["n"]
    for step in range(first["step"], last):
        if position >= samples:
            epoch += 1
            position = 0
        if step in changes:
            samples = changes[step]
            position = 0
        batch = range(position, min(position + first["global_batch_size"], samples))
        yield step + 1, epoch, batch, samples
        position = batch.stop
