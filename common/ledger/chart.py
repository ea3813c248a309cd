"""Curves as inline SVG: a column of pixels keeps the least and the largest value, so no spike is lost."""
import math
from html import escape

COLUMNS, HEIGHT = 600, 160
MARKS = {"rescue": ("green", 120), "resize": ("violet", 0), "death": ("red", 0)}  # colour, upper end


def chart(title, curves, marks=(), unit="step"):
    """A <figure>; `curves`: (name, css class, xs, ys), `marks`: (x, kind, words) as lines over the height."""
    curves = [(name, style, xs, ys) for name, style, xs, ys in curves if len(xs)]
    if not curves:
        return ""
    left, right = min(min(xs) for *_, xs, _ in curves), max(max(xs) for *_, xs, _ in curves)
    low, high = min(min(ys) for *_, ys in curves), max(max(ys) for *_, ys in curves)
    across, up = COLUMNS / ((right - left) or 1), HEIGHT / ((high - low) or 1)

    def place(x, y):
        return f"{(x - left) * across:.1f},{HEIGHT - (y - low) * up:.1f}"

    drawn = []
    for x, kind, words in sorted(marks, key=lambda mark: list(MARKS).index(mark[1])):
        colour, top = MARKS[kind]
        if left <= x <= right:
            at = f"{(x - left) * across:.1f}"
            drawn.append(f'<line class="{colour}" x1="{at}" x2="{at}" y1="{top}" y2="{HEIGHT}">'
                         f"<title>{escape(words)}</title></line>")
    for name, style, xs, ys in curves:
        points = [place(x, y) for x, y in thin(xs, ys, left, right)]
        drawn.append(f'<polyline class="{style}" points="{" ".join(points)}">'
                     f"<title>{escape(name)}</title></polyline>")
        if len(points) == 1 or "dots" in style:
            drawn.append(f'<path class="{style}" d="{"".join(f"M{point}h0" for point in points)}"/>')
    names = "".join(f'<span class="{style}">{escape(name)} {ys[-1]:.4g}</span>'
                    for name, style, _, ys in curves)
    return (f'<figure><figcaption><b>{escape(title)}</b>{names}</figcaption><i>{high:.4g}</i>{svg(drawn)}'
            f"<p><i>{low:.4g}</i><i>{unit} {left:,.6g} to {right:,.6g}</i></p></figure>")


def svg(parts, height=HEIGHT):
    return (f'<svg viewBox="0 0 {COLUMNS} {height}" preserveAspectRatio="none" style="height:{height}px">'
            f'{"".join(parts)}</svg>')


def thin(xs, ys, left, right):
    """At most two points per column, the least and the largest value, in the order in which they came."""
    width, column, kept = ((right - left) or 1) / COLUMNS, None, []
    for x, y in zip(xs, ys, strict=True):
        at = math.floor((x - left) / width)
        if at != column:
            yield from kept
            column, kept = at, [(x, y)]
        elif len(kept) == 1:
            kept.append((x, y))
        elif y < min(kept[0][1], kept[1][1]) or y > max(kept[0][1], kept[1][1]):
            beaten = 0 if (y < kept[0][1]) == (kept[0][1] < kept[1][1]) else 1
            kept = [kept[1 - beaten], (x, y)]
    yield from kept


def bar(parts):
    """{name: (share, colour)} side by side."""
    at, drawn = 0.0, []
    for name, (share, colour) in parts.items():
        drawn.append(f'<rect x="{at * COLUMNS:.2f}" width="{share * COLUMNS:.2f}" height="28" '
                     f'fill="{colour}"><title>{escape(name)} {share:.1%}</title></rect>')
        at += share
    return svg(drawn, 28)
