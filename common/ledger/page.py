"""One page that shows a run, or two laid over each other: HTML and inline SVG, no scripts, no network."""
import json
from array import array
from collections import defaultdict
from contextlib import suppress
from html import escape
from pathlib import Path

from common.ledger.account import summarize
from common.ledger.chart import COLUMNS, bar, chart, svg
from common.ledger.lives import is_number, lives_of, own
from common.ledger.report import death_in_words

MOST_CHARTS, MOST_LIVES = 16, 200
FACTS = ("world", "stages", "n", "data", "order")   # of a life, that may change
COLOUR = {name: f"hsl({hue} 55% {light}%)" for name, hue, light in (
    ("steps", 140, 45), ("redone", 0, 55), ("down", 0, 35), ("detection", 20, 55), ("rescue", 40, 55),
    ("data_wait", 200, 60), ("evaluation", 220, 60), ("save_stall", 260, 60), ("start", 290, 60),
    ("import", 300, 45), ("rendezvous", 310, 70), ("load", 180, 40), ("restore", 170, 60), ("other", 0, 60))}
STYLE = """
:root{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--dim:#667;--a:#0969da;--b:#d4720b;--line:#d0d7de}
@media(prefers-color-scheme:dark){
:root{--fg:#e6edf3;--bg:#0d1117;--dim:#9aa4af;--a:#58a6ff;--b:#f0a05a;--line:#333b44}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--fg);background:var(--bg)}
body{margin:0 auto;max-width:1100px;padding:1em}
h1{font-size:1.3em;overflow-wrap:anywhere}h2{font-size:1.05em;margin:1.6em 0 .4em}
.grid{display:grid;gap:1.2em;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
figure{margin:0;min-width:0}figcaption{display:flex;flex-wrap:wrap;gap:0 1em}svg{width:100%;display:block}
figure svg{border-left:1px solid var(--line);border-bottom:1px solid var(--line)}
i{font-style:normal;font-size:12px;color:var(--dim)}
figure p{display:flex;justify-content:space-between;margin:0}
polyline,line,path{fill:none;stroke-width:1.5;vector-effect:non-scaling-stroke}
path{stroke-width:6;stroke-linecap:round}polyline.dots{stroke-dasharray:4 3}
.a{stroke:var(--a);color:var(--a)}.b{stroke:var(--b);color:var(--b)}span{stroke:none}
.red{stroke:#d1242f}.violet{stroke:#8250df}.green{stroke:#2da44e;stroke-width:3}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px}td,th{text-align:left;padding:.2em .8em .2em 0}
tr+tr td{border-top:1px solid var(--line)}
.life{fill:#2da44e}.scroll table{min-width:600px}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
"""


def page(*run_dirs):
    """The whole page, from the runs' files alone."""
    runs = [Run(run_dir) for run_dir in run_dirs]
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    titles = list(dict.fromkeys(name.removeprefix("val_") for name in names))
    first = [name for name in ("loss", "acc", "lr", "samples/s") if name in titles]
    titles = (first + [name for name in titles if name not in first])[:MOST_CHARTS]
    marks = [mark for run in runs for mark in run.marks]
    charts = []
    for title in titles:
        charts.append(chart(title, [
            (name, style + " dots" * name.startswith("val_"), *run.curves[name])
            for run, style in zip(runs, "ab", strict=False)
            for name in (title, f"val_{title}") if name in run.curves], marks))
    heading = escape(" and ".join(str(run.folder) for run in runs))
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{heading}</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<link rel="icon" href="data:,"><style>{STYLE}</style><h1>{heading}</h1>'
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
                with suppress(ValueError):
                    self._add(json.loads(line))
        self._throughput()
        self.marks = list(self._marks())

    def _add(self, row):
        for name, value in row.items():
            if name not in ("step", "epoch") and is_number(value) and is_number(row.get("step")):
                self._point(name, row["step"], value)

    def _point(self, name, step, value):
        steps, values = self.curves[name]
        steps.append(step), values.append(value)

    def _throughput(self):
        for events in self.lives:
            entries, size = own(events, "steps", "t", "at"), events[0].get("global_batch_size", 0)
            for old, new in zip(entries, entries[1:], strict=False):
                if new["t"] > old["t"] and new["at"] > old["at"]:
                    rate = (new["at"] - old["at"]) * size / (new["t"] - old["t"])
                    self._point("samples/s", new["at"], rate)

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
        facts, spent = self.facts, {n: s for n, s in self.facts["buckets"].items() if s}
        wall, goodput = facts["wall_s"] or 1.0, facts["goodput"]
        keys = "".join(f'<tr><td><span class="key" style="background:{COLOUR[name]}"></span>'
                       f"{name.replace('_', ' ')}<td>{seconds:,.1f} s<td>{seconds / wall:.1%}</tr>"
                       for name, seconds in spent.items())
        counted = f"lives {len(facts['lives'])}, deaths {len(facts['deaths'])}, saved step {facts['step']}"
        return (f"<h2>{escape(str(self.folder))}: where {facts['wall_s']:,.1f} s went</h2>"
                f"<p>goodput {'unknown' if goodput is None else f'{goodput:.1%}'}, {counted}</p>"
                + bar({name: (seconds / wall, COLOUR[name]) for name, seconds in spent.items()})
                + f"<table>{keys}</table><h2>Number of processes over time, life by life</h2>"
                f'{self._time_line()}<div class="scroll"><table><tr><th>life<th>processes<th>steps<th>seconds'
                f'<th>what changed<th>who died</tr>{"".join(self._rows())}</table></div><h2>Options</h2>'
                f'<div class="scroll"><table>{"".join(self._options())}</table></div>')

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

    def _rows(self):
        told = [{}, *self.facts["lives"]]
        for before, life in list(zip(told, told[1:], strict=False))[-MOST_LIVES:]:
            dead = "; ".join(death_in_words(d) for d in self.facts["deaths"] if d["life"] == life["life"])
            seconds = sum(life["buckets"].values())
            cells = (life["life"], life["world"], f"{life['step']} to {life['saved']}", f"{seconds:,.1f}",
                     "; ".join(changes(before, life)) if before else "", dead)
            yield "<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in cells) + "</tr>"

    def _options(self):
        options = {}
        with suppress(OSError, ValueError, KeyError):
            options = json.loads((self.folder / "options.json").read_text(encoding="utf-8"))["options"]
        options |= self.facts["lives"][-1].get("options", {})
        for name, value in options.items():
            yield f"<tr><td>{escape(str(name))}<td>{escape(str(value))}</tr>"


def changes(before, life):
    """What differs between two lives: flags, processes, hosts, data."""
    old, new = ({name: told.get(name) for name in FACTS} | told.get("options", {})
                | {"hosts": " ".join(sorted(set(told.get("hosts", []))))} for told in (before, life))
    return [f"{name} {old.get(name, 'default')} → {new.get(name, 'default')}" for name in {**old, **new}
            if old.get(name) != new.get(name)]
