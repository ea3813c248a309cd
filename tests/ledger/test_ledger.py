"""The ledger survives what kills disks, and its report adds up."""
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.ledger import Ledger, summarize
from common.ledger.__main__ import main

HOUSE = Path(__file__).parents[2]


def test_the_report_tells_lives_worlds_restart_times_saves_rescues_and_goodput(tmp_path, capsys):
    events = [{"t": 1000, "event": "life", "life": "aa", "world": 4, "restart": 0, "step": 0, "job": "j",
               "import_s": 3},
              {"t": 1040, "event": "time", "steps_s": 30, "evaluate_s": 2},
              {"t": 1041, "event": "save", "step": 40},
              {"t": 1050, "event": "rescue", "step": 47},
              {"t": 1050.25, "event": "left", "life": "aa", "rank": 1, "stepped": 1049, "noticed": 1049.5},
              {"t": 1050.5, "event": "left", "life": "aa", "rank": 2, "stepped": 1048.75, "noticed": 1049.25},
              {"t": 1060, "event": "life", "life": "bb", "world": 2, "restart": 1, "step": 47, "job": "j",
               "began": 1052,
               "import_s": 7, "restore_s": 0.25},
              {"t": 1061, "event": "first_step", "step": 48, "first_step_s": 0.5},
              {"t": 1100, "event": "time", "steps_s": 36}]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"""{tmp_path}: lives 2, last saved step 47
  life aa  world 4  restart 0  resumed at step 0, saved up to 47  import 3.00 s, steps 30.00 s, \
evaluate 2.00 s
  restart of 12.00 s, step to step: detect 0.25 s, tear down 1.25 s, rendezvous 1.50 s, import 7.00 s, \
restore 0.25 s, first step 1.75 s
  life bb  world 2  restart 1  resumed at step 47, saved up to 47  steps 36.00 s
saves 1, rescues 1, restarts 1 (median 12.00 s from step to step)
wall 100.0 s: import 10.00 s, steps 66.00 s, evaluate 2.00 s, restore 0.25 s, first step 0.50 s, \
detect 0.25 s, tear down 1.25 s, \
rendezvous 1.50 s
goodput 66.0% (time in steps / wall)
"""
    facts = summarize(tmp_path)
    assert facts["goodput"] == 0.66 and [life["world"] for life in facts["lives"]] == [4, 2]


def the_gap(tmp_path, *between, **second):
    """What the ledger tells of the time between two lives of one job, aa and bb."""
    events = [{"t": 100, "event": "life", "life": "aa", "world": 2, "step": 0, "job": "j", "began": 98},
              *between,
              {"t": 124, "event": "life", "life": "bb", "world": 2, "step": 9, "job": "j", "began": 120,
               "import_s": 2.5} | second]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return summarize(tmp_path)["lives"][1]["gap"]


def test_where_nobody_survived_the_time_since_the_last_entry_is_away(tmp_path):
    assert the_gap(tmp_path, {"t": 110, "event": "steps", "steps_s": 9, "at": 8}) == {"away_s": 10,
                                                                                      "import_s": 2.5}


def test_what_a_person_started_is_no_restart_and_the_time_before_it_was_down(tmp_path, capsys):
    left = {"t": 110, "event": "left", "life": "aa", "rank": 0, "stepped": 109, "noticed": 109}
    assert the_gap(tmp_path, left, job="another") == {"down_s": 10}
    assert main([str(tmp_path)]) == 0
    assert "down 10.00 s, then started again\n" in (out := capsys.readouterr().out) and "restarts 0\n" in out


def test_only_what_the_life_before_said_of_itself_counts(tmp_path):
    """A process that was stopped and wakes up two lives later; and words that no process of ours would write.
    """
    own, rest = {"t": 112, "event": "left", "life": "aa", "stepped": 110.5,
                 "noticed": 110.25}, {"rendezvous_s": 8, "import_s": 2.5}
    others = [own | {"life": "00", "t": 119}, own | {"stepped": "x"}, {"event": "left", "life": "aa"}]
    assert the_gap(tmp_path, *others, own) == {"detect_s": 0, "tear_down_s": 1.5} | rest


def test_a_ledger_of_an_older_version_tells_no_gaps(tmp_path):
    assert the_gap(tmp_path, job=None) == {} and the_gap(tmp_path, began=None) == {}


def test_a_run_without_times_still_has_a_report(tmp_path, capsys):
    Ledger(tmp_path).event("life", life="aa", world=1, step=0)
    assert main([str(tmp_path)]) == 0
    assert "lives 1" in (out := capsys.readouterr().out) and "goodput unknown" in out


def test_events_are_private_lines_with_a_time(tmp_path):
    Ledger(tmp_path / "new").event("save", step=3, name="x", where=Path("a\nb"))
    path = tmp_path / "new" / "ledger.jsonl"
    (line,) = path.read_text().splitlines()
    assert {**json.loads(line), "t": 0} == {"t": 0, "event": "save", "step": 3, "name": "x", "where": "a\nb"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_line_after_a_torn_one_is_whole(tmp_path):
    (tmp_path / "ledger.jsonl").write_text('{"event": "save", "st')
    Ledger(tmp_path).event("life", life="aa", world=1, step=0)
    assert [life["life"] for life in summarize(tmp_path)["lives"]] == ["aa"]


def test_a_full_disk_costs_one_warning_and_later_lines_are_whole(tmp_path, monkeypatch, capsys):
    book, write = Ledger(tmp_path), os.write
    book.event("life", life="aa", world=1, step=0)
    # as a disk that is filling up does
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    book.event("save", step=1)
    monkeypatch.setattr(os, "write", lambda fd,
                        data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    book.event("save", step=2)
    monkeypatch.undo()
    book.event("save", step=3)
    assert capsys.readouterr().err.count("warning") == 1
    assert summarize(tmp_path)["events"] == {"life": 1, "save": 1}


@pytest.mark.parametrize("obstacle", ["link", "folder", "file in the way"])
def test_what_cannot_be_written_costs_one_warning_even_without_a_stderr(tmp_path, monkeypatch, capsys,
                                                                        obstacle):
    target = tmp_path / "run" / "ledger.jsonl"
    if obstacle == "file in the way":
        target.parent.write_text("")
    else:
        target.parent.mkdir()
        target.symlink_to(tmp_path / "elsewhere") if obstacle == "link" else target.mkdir()
    book = Ledger(tmp_path / "run")
    book.event("save", step=1)
    book.event("save", step=2)
    assert capsys.readouterr().err.count("warning") == 1
    assert not (tmp_path / "elsewhere").exists()
    monkeypatch.setattr(sys, "stderr", open(os.devnull))  # cannot be written to either
    Ledger(tmp_path / "run").event("save", step=3)


def test_lines_of_many_writers_do_not_mix(tmp_path):
    program = ("import sys; from common.ledger import Ledger; book = Ledger(sys.argv[1])\n"
               "for k in range(200): book.event('life', life=sys.argv[2], world=1, step=k, "
               "ids=list(range(500)))")
    writers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name], cwd=HOUSE)
               for name in "abcd"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0, 0]
    assert summarize(tmp_path)["events"] == {"life": 800}


def test_the_report_imports_no_torch():
    program = "import common.ledger, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=HOUSE).returncode == 0
