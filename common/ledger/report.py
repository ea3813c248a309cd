"""The reports of a run: lines of words, or a page of HTML and inline SVG, without scripts or network."""
import json
import math
from array import array
from collections import Counter, defaultdict
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import median

from common.ledger.account import is_number, lives_of, own, summarize

FACTS = ("world", "stages", "n", "data", "order")   # of a life, that may change
MOST_CHARTS, FIRST = 16, ("loss", "acc", "lr", "samples/s")
COLUMNS, HEIGHT = 600, 160                          # of a chart
STYLE = Path(__file__).with_suffix(".css")
MARKS = {"rescue": ("green", 120), "resize": ("violet", 0), "death": ("red", 0)}  # colour, upper end
COLOUR = {name: f"hsl({hue} 55% {light}%)" for name, hue, light in (
    ("steps", 140, 45), ("redone", 0, 55), ("down", 0, 35), ("detection", 20, 55), ("rescue", 40, 55),
    ("data_wait", 200, 60), ("evaluation", 220, 60), ("save_stall", 260, 60), ("start", 290, 60),
    ("import", 300, 45), ("rendezvous", 310, 70), ("load", 180, 40), ("restore", 170, 60), ("other", 0, 60))}


def report(facts):
    """Yield the lines of the goodput report, from what `summarize` returned."""
    events, goodput, before = facts["events"], facts["goodput"], None
    yield f"lives {events['life']}, last saved step {facts['step']}"
    for life in facts["lives"]:
        if life["gap"]:
            how = "restart" if life["again"] else "started again after"
            yield f"  {how} {sum(life['gap'].values()):.2f} s: {_spell(life['gap'])}"
        own = {name: value for name, value in life["buckets"].items() if name not in life["gap"]}
        yield (f"  life {life['life']}  world {life['world']}  restart {life.get('restart', '?')}  "
               f"resumed at step {life['step']}, saved up to {life['saved']}  {_spell(own)}".rstrip())
        if before and (changed := "; ".join(_changes(before, life))):
            yield f"    changed: {changed}"
        before = life
        dead = [death for death in facts["deaths"] if death["life"] == life["life"]]
        yield from (f"    {death_in_words(death)}" for death in dead)
    whole = [sum(life["gap"].values()) for life in facts["lives"] if life["again"]]
    yield (f"saves {events.get('save', 0)}, rescues {events.get('rescue', 0)}, restarts {len(whole)}"
           + (f" (median {median(whole):.2f} s)" if whole else ""))
    yield f"wall {facts['wall_s']:.1f} s: {_spell(facts['buckets']) or 'no times were recorded'}"
    goodput = "unknown" if goodput is None else f"{goodput:.1%}"
    yield f"goodput {goodput} (time in steps that are in the final model / wall)"


def by_host(facts):
    """Yield a line per host: processes, deaths, hangs and slow spells, so that a bad machine shows."""
    hosts, sick = Counter(), {name: Counter() for name in ("death", "hang", "straggler")}
    for life in facts["lives"]:
        names = life.get("hosts", ["?"] * life["world"])
        hosts.update(names)
        for kind in ("hang", "straggler"):
            sick[kind].update(names[rank] for rank in life[kind] if 0 <= rank < len(names))
    sick["death"].update(death["host"] or "?" for death in facts["deaths"])
    for host in sorted(hosts, key=lambda name: (-sum(count[name] for count in sick.values()), name)):
        yield (f"{host}: {hosts[host]} processes in {len(facts['lives'])} lives, "
               f"deaths {sick['death'][host]}, hangs {sick['hang'][host]}, "
               f"straggler {sick['straggler'][host]} times")


def death_in_words(death):
    where = f" on {death['host']}" if death["host"] else ""
    return f"rank {death['rank']} (pid {death['pid'] or '?'}{where}) {death['cause']}"


def _changes(before, life):
    """What differs between two lives: flags, processes, hosts, data."""
    old, new = ({name: told.get(name) for name in FACTS} | told.get("options", {})
                | {"hosts": " ".join(sorted(set(told.get("hosts", []))))} for told in (before, life))
    return [f"{name} {old.get(name, 'default')} → {new.get(name, 'default')}" for name in {**old, **new}
            if old.get(name) != new.get(name)]


def _spell(seconds):
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f} s" for name, value in seconds.items() if value)


def page(*run_dirs):
    """The whole page, from the runs' files alone."""
    runs = [Run(run_dir) for run_dir in run_dirs]
    titles = sorted({name.removeprefix("val_"): 0 for run in runs for name in run.curves},
                    key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))[:MOST_CHARTS]
    marks = [mark for run in runs for mark in run.marks]
    charts = [chart(title, [(name, style + " dots" * name.startswith("val_"), *run.curves[name])
                            for run, style in zip(runs, "ab", strict=False)
                            for name in (title, f"val_{title}") if name in run.curves], marks)
              for title in titles]
    heading = escape(" and ".join(str(run.folder) for run in runs))
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{heading}</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<link rel="icon" href="data:,"><style>{STYLE.read_text("utf-8")}</style><h1>{heading}</h1>'
            "<p><i>Lines: a death is red, a rescue green, another number of processes violet; "
            "dots are evaluations.</i></p>"
            f'<div class="grid">{"".join(charts)}</div>{"".join(run.section() for run in runs)}</html>')


class Run:
    """One run's files: curves {name: (steps, values)}, marks, lives."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.facts, self.lives = summarize(folder), lives_of(folder)
        self.curves = defaultdict(lambda: (array("d"), array("d")))
        with suppress(OSError), open(self.folder / "metrics.jsonl", "rb") as file:
            for line in file:
                with suppress(ValueError, TypeError, AttributeError):
                    row = json.loads(line)
                    for name in row.keys() - {"step", "epoch"}:
                        self._point(name, row.get("step"), row[name])
        for events in self.lives:
            entries, size = own(events, "steps", "t", "at"), events[0].get("global_batch_size", 0)
            for old, new in zip(entries, entries[1:], strict=False):
                if new["t"] > old["t"] and new["at"] > old["at"]:
                    rate = (new["at"] - old["at"]) * size / (new["t"] - old["t"])
                    self._point("samples/s", new["at"], rate)
        self.marks = list(self._marks())

    def _point(self, name, step, value):
        if is_number(step) and is_number(value):
            steps, values = self.curves[name]
            steps.append(step), values.append(value)

    def _marks(self):
        for death in self.facts["deaths"]:
            yield death["saved"], "death", f"step {death['saved']}: {death_in_words(death)}"
        for events in self.lives:
            for event in own(events, "rescue", "step", "rank"):
                yield event["step"], "rescue", f"step {event['step']} saved by rank {event['rank']}"
        for old, new in zip(self.facts["lives"], self.facts["lives"][1:], strict=False):
            if old["world"] != new["world"]:
                yield new["step"], "resize", f"step {new['step']}: {old['world']} to {new['world']} processes"

    def section(self):
        """What is told of each run apart."""
        spent, wall = self.facts["buckets"], self.facts["wall_s"] or 1.0
        at, parts, keys = 0.0, [], []
        for name, seconds in ((name, seconds) for name, seconds in spent.items() if seconds):
            words = f"{name.replace('_', ' ')}<td>{seconds:,.1f} s<td>{seconds / wall:.1%}"
            keys.append(f'<tr><td><span class="key" style="background:{COLOUR[name]}"></span>{words}')
            parts.append(f'<rect x="{at / wall * COLUMNS:.2f}" width="{seconds / wall * COLUMNS:.2f}" '
                         f'height="28" fill="{COLOUR[name]}"><title>{name}</title></rect>')
            at += seconds
        rows = (f"<tr><td>{escape(str(name))}<td>{escape(str(value))}" for name, value in self._options())
        return (f"<h2>{escape(str(self.folder))}: where {self.facts['wall_s']:,.1f} s went</h2>"
                f'{svg(parts, 28)}<table>{"".join(keys)}</table><h2>Number of processes over time, life by '
                f'life</h2>{self._time_line()}<pre>{escape(chr(10).join(report(self.facts)))}</pre>'
                f'<h2>Options</h2><table>{"".join(rows)}</table>')

    def _time_line(self):
        start, wall = self.facts["lives"][0]["start"], self.facts["wall_s"] or 1.0
        most, drawn = max(life["world"] for life in self.facts["lives"]) or 1, []
        for life in self.facts["lives"]:
            seconds = sum(s for name, s in life["buckets"].items() if name != "down")
            x, width = ((s / wall * COLUMNS) for s in (life["start"] - start, seconds))
            high, name, count = 80 * life["world"] / most, life["life"], life["world"]
            words = f"life {name}: {count} processes, {seconds:.1f} s, from step {life['step']}"
            drawn.append(f'<rect x="{x:.2f}" y="{80 - high:.1f}" width="{max(0.5, width - 0.5):.2f}" '
                         f'height="{high:.1f}" class="life"><title>{escape(words)}</title></rect>')
        return f"<figure><i>{most} processes</i>{svg(drawn, 80)}<p><i>0</i><i>{wall:,.1f} s</i></p></figure>"

    def _options(self):
        options = {}
        with suppress(OSError, ValueError, KeyError):
            options = json.loads((self.folder / "options.json").read_text(encoding="utf-8"))["options"]
        return (options | self.facts["lives"][-1].get("options", {})).items()


def chart(title, curves, marks):
    """A <figure>; `curves`: (name, css class, xs, ys), `marks`: (x, kind, words) as lines over the height."""
    left, right = min(min(xs) for *_, xs, _ in curves), max(max(xs) for *_, xs, _ in curves)
    low, high = min(min(ys) for *_, ys in curves), max(max(ys) for *_, ys in curves)
    across, up = COLUMNS / ((right - left) or 1), HEIGHT / ((high - low) or 1)
    drawn = []
    for x, kind, words in sorted(marks, key=lambda mark: list(MARKS).index(mark[1])):
        colour, top = MARKS[kind]
        if left <= x <= right:
            at = f"{(x - left) * across:.1f}"
            drawn.append(f'<line class="{colour}" x1="{at}" x2="{at}" y1="{top}" y2="{HEIGHT}">'
                         f"<title>{escape(words)}</title></line>")
    for name, style, xs, ys in curves:
        points = [f"{(x - left) * across:.1f},{HEIGHT - (y - low) * up:.1f}"
                  for x, y in thin(xs, ys, left, right)]
        drawn.append(f'<polyline class="{style}" points="{" ".join(points)}">'
                     f"<title>{escape(name)}</title></polyline>")
        if len(points) == 1 or "dots" in style:
            drawn.append(f'<path class="{style}" d="{"".join(f"M{point}h0" for point in points)}"/>')
    names = "".join(f'<span class="{style}">{escape(name)} {ys[-1]:.4g}</span>'
                    for name, style, _, ys in curves)
    return (f'<figure><figcaption><b>{escape(title)}</b>{names}</figcaption><i>{high:.4g}</i>{svg(drawn)}'
            f"<p><i>{low:.4g}</i><i>step {left:,.6g} to {right:,.6g}</i></p></figure>")


def svg(parts, height=HEIGHT):
    return (f'<svg viewBox="0 0 {COLUMNS} {height}" preserveAspectRatio="none" style="height:{height}px">'
            f'{"".join(parts)}</svg>')


def thin(xs, ys, left, right):
    """At most two points a column, the least and the largest value in the order they came: no spike is lost.
    """
    columns = {}
    for x, y in zip(xs, ys, strict=True):
        kept = columns.setdefault(math.floor((x - left) * COLUMNS / ((right - left) or 1)), [])
        kept.append((x, y))
        if len(kept) == 3:
            low, high = min(kept, key=_height), max(kept, key=_height)
            kept[:] = sorted({low, high})
    return [point for kept in columns.values() for point in kept]


def _height(point):
    return point[1]
