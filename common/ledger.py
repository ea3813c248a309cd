"""Where the time and the samples of a run went: append-only JSON lines, a report, and an audit that can fail.

    python -m common.ledger RUN             lives, restarts, saves, rescues, goodput
    python -m common.ledger RUN --audit     missed 0 repeated 0 lost 0 redone 0   (samples, samples, steps, steps)
    python -m common.ledger RUN RUN2 --audit    of nodes with folders of their own

Nobody waits for the ledger and nobody dies of it: a full disk costs a warning and lines, never a training step.
No torch here: the report must come at once, also on a login node.
"""
import argparse
import json
import os
import sys
import time
from array import array
from collections import Counter
from contextlib import suppress
from pathlib import Path

from common.errors import UserError
from common.restarts import BETWEEN, counted, gap, in_words, lives_of, planned, read, spell


class Lines:
    """A file of JSON objects, one a line; append() survives a failing disk and never glues two lines together."""

    def __init__(self, path):
        self.path, self.fd, self.warned = Path(path), None, False

    def append(self, record):
        line = (json.dumps(record, default=_plain) + "\n").encode()
        try:
            if self.fd is None:
                self._open()
            # One write: with O_APPEND the kernel puts it at the end as a whole, whoever else is writing on this machine, and
            # a process killed before or after it leaves whole lines. Two clients of NFS may overwrite each other's.
            if os.write(self.fd, line) < len(line):
                raise OSError("the disk took only part of a line")
        except OSError as error:
            self.close()
            if not self.warned:
                self.warned = True
                with suppress(OSError, ValueError):  # stderr may be as full, or as closed, as the disk
                    print(f"warning: {self.path}: {error}; training goes on, lines will be missing", file=sys.stderr)

    def _open(self):
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        size = os.fstat(self.fd).st_size
        if size and os.pread(self.fd, 1, size - 1) != b"\n":
            os.write(self.fd, b"\n")  # a full disk or a power cut tore the last line: it must not swallow ours

    def close(self):
        fd, self.fd = self.fd, None
        if fd is not None:
            with suppress(OSError):  # network disks may say only here that they are full
                os.close(fd)


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Ledger:
    """RUN/ledger.jsonl. Events named "life", "save" and "rescue" mean something to the report and carry `step`.

    Fields ending in `_s` are seconds and are added up by name; `steps_s` is the time in which steps were made. "left" is
    what a process says that leaves its life early, with the moments of its last whole step and of learning why.
    """

    def __init__(self, run_dir):
        self.lines = Lines(Path(run_dir) / "ledger.jsonl")

    def event(self, name, /, **fields):
        self.lines.append({"t": round(time.time(), 3), "event": name, **fields})


class Audit:
    """What one rank trained on in one life: begin() before gradients are exchanged, done() after the update.

    A step that anybody has finished was begun by all: what the dead had contributed is on disk too.
    """

    def __init__(self, run_dir, life, rank, on=True):
        self.on, self.lines = on, Lines(Path(run_dir) / "audit" / f"life-{life}-rank{rank}.jsonl")

    def begin(self, step, epoch, position, ids):
        if self.on:
            self.lines.append({"event": "begin", "step": step, "epoch": epoch, "position": position, "ids": ids})

    def done(self, step):
        if self.on:
            self.lines.append({"event": "done", "step": step})


def _saved(events):
    """Return the last step that a checkpoint of this life is known to hold."""
    steps = [event.get("step") for event in events if event["event"] in ("life", "save", "rescue")]
    return max(step for step in steps if isinstance(step, int))


def summarize(run_dir):
    """Return what the ledger tells: lives, events and seconds by name, and goodput (None where no step was timed)."""
    lives = lives_of(run_dir)
    everything = [event for events in lives for event in events]
    wall, seconds = max(event.get("t", 0) for event in everything) - everything[0]["t"], _seconds(everything)
    gaps = [{}, *(gap(before, after) for before, after in zip(lives, lives[1:], strict=False))]
    for parts in gaps:
        seconds |= {name: seconds.get(name, 0) + value for name, value in parts.items() if name in BETWEEN}
    return {
        "lives": [{**events[0], "saved": _saved(events), "seconds": _seconds(events), "gap": parts}
                  for events, parts in zip(lives, gaps, strict=True)],
        "step": max(_saved(events) for events in lives),
        "events": dict(Counter(event["event"] for event in everything)),
        "seconds": seconds,
        "wall_s": wall,
        "goodput": seconds["steps_s"] / wall if wall > 0 and "steps_s" in seconds else None,
    }


def _seconds(events):
    total = Counter()
    for event in events:
        total.update({k: v for k, v in event.items() if k.endswith("_s") and isinstance(v, int | float)})
    return dict(total)


def report(run_dir):
    """Yield the lines of the goodput report."""
    facts = summarize(run_dir)
    events, goodput = facts["events"], facts["goodput"]
    yield f"{run_dir}: lives {events['life']}, last saved step {facts['step']}"
    for life in facts["lives"]:
        yield from in_words(life["gap"])
        own = {name: value for name, value in life["seconds"].items() if name not in life["gap"]}
        yield (f"  life {life['life']}  world {life['world']}  restart {life.get('restart', '?')}  "
               f"resumed at step {life['step']}, saved up to {life['saved']}  {spell(own)}".rstrip())
    yield f"saves {events.get('save', 0)}, rescues {events.get('rescue', 0)}, {counted([life['gap'] for life in facts['lives']])}"
    yield f"wall {facts['wall_s']:.1f} s: {spell(facts['seconds']) or 'no times were recorded'}"
    yield f"goodput {'unknown' if goodput is None else f'{goodput:.1%}'} (time in steps / wall)"


def audit(*run_dirs, explain=lambda line: None):
    """Return missed and repeated samples, lost and redone steps, along the chain of lives that leads to the last step.

    Lost: done by somebody, and the next life resumed before it. Redone: each time a step was made beyond its first.
    Missed: the notes are there, the sample is not. A step that a rank has no notes around (a file that is gone, a life without
    --audit, another node's folder) and that lacks samples is in "unproven", a list that is there if it is not empty.
    The expectation comes from (n, seed, global batch size) and the step's number alone, never from the log itself.
    """
    from common.sampler import permute  # here, because it imports torch

    folders = [Path(run_dir) / "audit" for run_dir in run_dirs]
    lives = lives_of(*run_dirs)
    if not any(path for folder in folders for path in folder.glob("life-*.jsonl")):
        raise UserError(f"{folders[0]} holds no audit\ntrain with --audit to have one written")
    chain, executions, reached, lost = {}, Counter(), 0, 0  # chain: step -> ids it was trained on, in this lineage
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
        # A process can die after its update and before its done-line, and a survivor save that very update: what the
        # next life resumed past was made too. Any other step begun and not done has left no trace in the model.
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
    """Return {step: ids that any rank began to train on}, {step: how often the busiest rank has done it}, {rank: steps noted}."""
    begun, done, spans = {}, Counter(), {}
    for path in sorted(path for folder in folders for path in folder.glob(f"life-{life}-rank*.jsonl")):
        own, steps = Counter(), []
        for record in read(path):
            match record:
                case {"event": "begin", "step": int(step), "ids": list(ids)}:
                    begun.setdefault(step, array("q")).extend(ids)  # 8 bytes a sample: an audit may hold a great many
                    steps.append(step)
                case {"event": "done", "step": int(step)}:
                    own[step] += 1
                    steps.append(step)
        done |= own  # the larger of both counts
        if steps:
            spans[int(path.stem.rpartition("rank")[2])] = range(min(steps), max(steps) + 1)
    return begun, done, spans


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m common.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="+", help="the folder of a run; with --audit also those of its other nodes")
    parser.add_argument("--audit", action="store_true", help="compare what was trained on with what should have been")
    args = parser.parse_args(argv)
    try:
        if not args.audit:
            if len(args.run) > 1:
                raise UserError(f"{len(args.run)} folders without --audit\nname one")
            print("\n".join(report(*args.run)))
            return 0
        wrong = []
        found = audit(*args.run, explain=wrong.append)
        unproven = found.pop("unproven", [])
        print(*(f"{name} {count}" for name, count in found.items()))
        if unproven:
            print(f"unproven {len(unproven)} steps, from {unproven[0]} to {unproven[-1]}: a rank has no notes there "
                  "(lines that were lost, or the folder of another node: name it too)")
        print("".join(f"{line}\n" for line in wrong[:5]), end="", file=sys.stderr)
        return 1 if found["missed"] or found["repeated"] or unproven else 0
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
