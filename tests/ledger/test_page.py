"""The page of a run: it draws in a real browser, is whole by itself, and no spike is lost on it."""
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from test_ledger import KILLED, write

from common.checkpoint.files import sealed
from common.ledger import summarize
from common.ledger.__main__ import main
from common.ledger.report import COLUMNS, report, thin

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def a_run(folder, steps=60, spike=None):
    folder.mkdir()
    write(folder, *KILLED)
    rows = [{"step": step, "loss": 1 / step, "acc": 0.5, "lr": 0.1} for step in range(1, steps + 1)]
    if spike:
        rows[spike - 1]["loss"] = 77.0
    rows += [{"step": 30, "val_loss": 0.5, "val_acc": 0.4}, {"step": steps, "val_loss": 0.4, "val_acc": 0.6}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6')
    facts = {"options": {"lr": 0.1, "model": "<b>&amp;"}, "identity": {}}
    (folder / "options.json").write_bytes(sealed(facts))
    return folder


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.seen = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def named(self, tag):
        return [attributes for name, attributes in self.seen if name == tag]


def test_a_page_shows_curves_marks_times_lives_and_options_and_fetches_nothing(tmp_path, capsys):
    run = a_run(tmp_path / "run")
    assert main([str(run), "--html"]) == 0
    text = (run / "report.html").read_text()
    tags = Tags(text)
    for title in ("loss", "acc", "lr"):
        assert f"<b>{title}</b>" in text and f"val_{title}" in text or title == "lr"
    titles = re.findall("<title>(.*?)</title>", text)
    assert any("was killed by SIGKILL" in title for title in titles)
    assert any("saved by rank 2" in title for title in titles)
    assert any("3 to 2 processes" in title for title in titles) and "world 3 → 2" in text
    assert f"{summarize(run)['goodput']:.1%}" in text and "&lt;b&gt;&amp;amp;" in text
    assert {name for name, _ in tags.seen} & {"script", "img", "iframe"} == set()
    assert not re.search(r"https?://|url\(|@import", text)
    assert [link["href"] for link in tags.named("link")] == ["data:,"]


def test_a_day_between_two_lives_is_a_gap_with_its_length_written_and_the_rest_keeps_its_place(tmp_path):
    run, day = a_run(tmp_path / "run"), 86_400
    later = [event | {name: event[name] + day for name in ("t", "began") if name in event}
             for event in KILLED[8:]]
    later[0] |= {"job": "another", "options": {"save_every": 100, "workers": 2}}
    write(run, KILLED[0] | {"options": {"workers": 2}}, *KILLED[1:8], *later)
    assert main([str(run), "--html"]) == 0
    text = (run / "report.html").read_text()
    assert " (and 1 day, 0:00:01 down) went" in text and ">1 day, 0:00:01</b>" in text
    cells = [cell for cell in Tags(text).named("b") if "style" in cell]
    widths = [float(re.search(r"width:([\d.]+)%", cell["style"])[1]) for cell in cells]
    gaps = [width for cell, width in zip(cells, widths, strict=True) if cell["class"] == "down"]
    assert sum(widths) == pytest.approx(200, abs=0.1), "both bars are as wide as the page"
    assert gaps[0] == gaps[1] == pytest.approx(100 * 0.04 / 1.04, abs=0.1)
    given, _, rest = text.partition("<details>")
    assert "<td>save_every<td>100<" in given and "<td>workers<td>2<" in given
    assert "save_every default → 100" in text
    assert "<td>model<td>" in rest and "<td>model<td>" not in given
    words = "\n".join(report(summarize(run)))
    assert "started again after 1 day, 0:00:16" in words and "goodput 0.1%, without down 44.5%" in words
    assert [line.count("rescue 4.50 s") for line in words.splitlines()] == [0, 0, 0, 1, 0, 0, 0, 1, 0], words


def test_a_second_run_is_laid_over_the_first(tmp_path):
    runs = [a_run(tmp_path / name) for name in ("one", "two")]
    assert main([str(runs[0]), "--compare", str(runs[1]), "--html", str(tmp_path / "both.html")]) == 0
    text = (tmp_path / "both.html").read_text()
    assert str(runs[0]) in text and str(runs[1]) in text
    lines = [line["class"] for line in Tags(text).named("polyline")]
    assert lines[:4] == ["a", "a dots", "b", "b dots"]


def test_a_million_steps_make_a_small_page_and_keep_each_spike(tmp_path):
    steps = range(1, 1_000_001)
    values = [77.0 if step in (123_456, 999_999) else -5.0 if step == 500_001 else 1 / step for step in steps]
    points = list(thin(steps, values, 1, 1_000_000))
    assert len(points) <= 2 * (COLUMNS + 1) and points == sorted(points)
    assert {(123_456, 77.0), (999_999, 77.0), (500_001, -5.0)} <= set(points)


def test_a_run_folder_that_is_read_only_and_a_run_without_metrics_have_a_page(tmp_path, capsys):
    run = a_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "options.json").unlink()
    os.chmod(run, 0o500)
    try:
        assert main([str(run), "--html", str(tmp_path / "page.html")]) == 0
    finally:
        os.chmod(run, 0o700)
    assert "where 101.00 s went" in (tmp_path / "page.html").read_text()
    assert main([str(tmp_path / "nowhere"), "--html"]) == 2


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium (Debian: apt install chromium)")
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_draws_the_page_without_a_complaint(tmp_path, width):
    run, home = a_run(tmp_path / "run", spike=20), tmp_path / "home"
    main([str(run), "--html", "--compare", str(a_run(tmp_path / "two"))])
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
         f"--user-data-dir={home}", f"--window-size={width},1600", f"--screenshot={tmp_path}/page.png",
         f"file://{run}/report.html"], capture_output=True, text=True, timeout=120,
        env=os.environ | {"HOME": str(home)})
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    assert (tmp_path / "page.png").stat().st_size > 20_000, "an empty page is smaller"
