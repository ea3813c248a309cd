"""The reports of a run: lines of words, or a page of HTML and inline SVG, without scripts or network."""
import math
from array import array
from collections import Counter, defaultdict
from contextlib import suppress
from datetime import timedelta
from html import escape
from operator import itemgetter
from pathlib import Path
from statistics import median
from string import Template

from common.ledger.account import ENDING, STARTING, is_number, lives_of, own, read, summarize
from common.options import read_options

FACTS = ("world", "stages", "n", "data", "order")   # of a life, that may change
MOST_CHARTS, FIRST = 16, ("loss", "acc", "lr", "samples/s")
COLUMNS, HEIGHT = 600, 160                          # of a chart
GAP = 0.04         # of the time up: a longer "down" is drawn so wide, with its true length as text


def report(facts):
    """Yield the lines of the goodput report, from what `summarize` returned."""
    events, goodput, before = facts["events"], facts["goodput"], None
    yield f"lives {events['life']}, last saved step {facts['step']}"
    for life in facts["lives"]:
        if life["gap"]:
            how = "restart" if life["again"] else "started again after"
            yield f"  {how} {span(sum(life['gap'].values()))}: {_spell(life['gap'])}"
        between = STARTING * bool(before) + ENDING * (life is not facts["lives"][-1])
        own = {name: value for name, value in life["buckets"].items() if name not in between}
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
    words = "unknown" if goodput is None else f"{goodput:.1%}"
    if goodput and (down := facts["buckets"]["down"]):
        words += f", without down {goodput * facts['wall_s'] / (facts['wall_s'] - down):.1%}"
    yield f"goodput {words} (time in steps that are in the final model / wall)"


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
        yield (f"{host}: {hosts[host]} processes in {len(facts['lives'])} lives, deaths {sick['death'][host]}"
               f", hangs {sick['hang'][host]}, straggler {sick['straggler'][host]} times")


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
    return ", ".join(f"{name.replace('_', ' ')} {span(value)}" for name, value in seconds.items()
                     if value >= 0.005)


def span(seconds):
    return f"{seconds:.2f} s" if seconds < 600 else str(timedelta(seconds=round(seconds)))


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
    return filled("page.html", heading=escape(" and ".join(str(run.folder) for run in runs)),
                  charts="".join(charts), runs="".join(run.section() for run in runs))


def filled(name, **parts):
    return Template(Path(__file__).with_name(name).read_text("utf-8")).substitute(parts)


class Run:
    """One run's files: curves {name: (steps, values)}, marks, lives."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.facts, self.lives = summarize(folder), lives_of(folder)
        self.curves = defaultdict(lambda: (array("d"), array("d")))
        with suppress(OSError):
            for row in read(self.folder / "metrics.jsonl", "step"):
                for name in row.keys() - {"step", "epoch"}:
                    self._point(name, row["step"], row[name])
        for events in self.lives:
            entries, size = own(events, "steps", "t", "at"), events[0].get("global_batch_size", 0)
            for old, new in zip(entries, entries[1:], strict=False):
                if new["t"] > old["t"] and new["at"] > old["at"]:
                    rate = (new["at"] - old["at"]) * size / (new["t"] - old["t"])
                    self._point("samples/s", new["at"], rate)
        self.marks, self.spent = list(self._marks()), self.facts["buckets"]
        self.up = self.facts["wall_s"] - self.spent["down"] or 1.0
        self.gaps = sum(map(self._gap, self.facts["lives"]))

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
        """The part of the page about this run alone."""
        bar, times, words = "", [], list(report(self.facts))
        for name, seconds in ((name, seconds) for name, seconds in self.spent.items() if seconds):
            down, spelled = name == "down", name.replace("_", " ")
            bar += self._cell(name, self.gaps if down else seconds, spelled)
            times.append((f'<span class="key {name}"></span>{spelled}', span(seconds),
                          "" if down else f"{seconds / self.up:.1%}"))
        down, most = self.spent["down"], max(life["world"] for life in self.facts["lives"]) or 1
        given, others = (rows((escape(name), escape(str(value))) for name, value in each.items())
                         for each in self._options())
        return filled("run.html", folder=escape(str(self.folder)), bar=bar, times=rows(times),
                      up=span(self.up) + (f" (and {span(down)} down)" if down else ""), most=most,
                      summary=f"{words[0]}, {len(self.facts['deaths'])} deaths; {words[-1]}",
                      lives="".join(self._time_line(most)), given=given, others=others,
                      report="".join(f"<p>{escape(line)}</p>" for line in words))

    def _gap(self, life):
        """The seconds of "down" after a life, as far as they are drawn."""
        return min(life["buckets"].get("down", 0.0), GAP * self.up)

    def _cell(self, name, seconds, words, high=1.0, label=""):
        """A time in a bar, which is as wide as all of them; `name` is a class of the style sheet."""
        width = 100 * seconds / (self.up + self.gaps)
        return (f'<b class="{name}" style="width:{width:.3f}%;height:{high:.0%}" title="{escape(words)}">'
                f"{label}</b>")

    def _time_line(self, most):
        for life in self.facts["lives"]:
            spent = dict(life["buckets"])
            down, up = spent.pop("down", 0.0), sum(spent.values())
            words = f"life {life['life']}: {life['world']} processes, {span(up)}, from step {life['step']}"
            for name, seconds in (spent if up > self.up / 100 else {"steps": up}).items():
                yield self._cell(name, seconds, f"{words}; {name} {span(seconds)}", life["world"] / most)
            if dead := [death_in_words(d) for d in self.facts["deaths"] if d["life"] == life["life"]]:
                yield f'<u title="{escape("; ".join(dead))}"></u>'
            if gap := self._gap(life):
                yield self._cell("down", gap, f"down {span(down)}", label=span(down) if down > gap else "")

    def _options(self):
        """{name: value} of what was given to the newest life, and of the rest."""
        given, options = self.facts["lives"][-1].get("options", {}), {}
        with suppress(OSError, ValueError):
            options = read_options(self.folder)["options"]
        return given, {name: value for name, value in options.items() if name not in given}


def rows(cells):
    return "".join(f"<tr><td>{'<td>'.join(row)}" for row in cells)


def chart(title, curves, marks):
    """A <figure>; `curves`: (name, css class, xs, ys), `marks`: (x, kind, words) as lines over the height."""
    left, right = min(min(xs) for *_, xs, _ in curves), max(max(xs) for *_, xs, _ in curves)
    low, high = min(min(ys) for *_, ys in curves), max(max(ys) for *_, ys in curves)
    across, up = COLUMNS / ((right - left) or 1), HEIGHT / ((high - low) or 1)
    drawn = []
    for x, kind, words in sorted(marks, key=itemgetter(1), reverse=True):  # deaths over the others
        if left <= x <= right:
            at, top = f"{(x - left) * across:.1f}", HEIGHT * 3 // 4 if kind == "rescue" else 0
            drawn.append(f'<line class="{kind}" x1="{at}" x2="{at}" y1="{top}" y2="{HEIGHT}">'
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
    return filled("chart.html", title=escape(title), names=names, high=f"{high:.4g}", low=f"{low:.4g}",
                  columns=COLUMNS, height=HEIGHT, drawn="".join(drawn), steps=f"{left:,.6g} to {right:,.6g}")


def thin(xs, ys, left, right):
    """At most two points a column, its least and its largest value as they came: no spike is lost."""
    columns = {}
    for x, y in zip(xs, ys, strict=True):
        kept = columns.setdefault(math.floor((x - left) * COLUMNS / ((right - left) or 1)), [])
        kept.append((x, y))
        if len(kept) == 3:
            kept[:] = sorted({min(kept, key=itemgetter(1)), max(kept, key=itemgetter(1))})
    return [point for kept in columns.values() for point in kept]
