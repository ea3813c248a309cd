"""The ledger survives what kills disks, and its report adds up."""
import json
import os
import random
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from common.errors import UserError, run_command
from common.ledger import Clock, Ledger, history, summarize
from common.ledger.__main__ import main
from common.ledger.report import by_host, report
from common.replay import run as replay

HOUSE = Path(__file__).parents[2]


def write(folder, *events):
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "ledger.jsonl").write_text(text)


# Rank 0 of the first life is killed after step 48; steps 48 and 49 are lost, because a survivor saved 47.
KILLED = (
    {"t": 1000, "event": "life", "life": "aa", "world": 3, "restart": 0, "step": 0, "job": "j", "began": 990,
     "import_s": 3, "join_s": 2, "load_s": 1, "restore_s": 0.5, "pids": [7, 8, 9],
     "hosts": ["x", "y", "y"]},
    {"t": 1002, "event": "first_step", "step": 1, "first_step_s": 2},
    {"t": 1041, "event": "save", "step": 40, "save_s": 0.1},
    {"t": 1050, "event": "steps", "at": 49, "steps_s": 24, "data_wait_s": 14, "evaluation_s": 9,
     "save_stall_s": 1},
    {"t": 1052, "event": "death", "rank": 0, "why": "was killed by SIGKILL"},
    {"t": 1055, "event": "rescue", "step": 47, "rank": 2},
    {"t": 1056, "event": "left", "life": "aa", "rank": 1, "stepped": 1049, "noticed": 1053},
    {"t": 1057, "event": "left", "life": "aa", "rank": 2, "stepped": 1051, "noticed": 1052.5},
    {"t": 1067, "event": "life", "life": "bb", "world": 2, "restart": 1, "step": 47, "job": "j",
     "began": 1058, "import_s": 7, "restore_s": 0.25},
    {"t": 1068, "event": "first_step", "step": 48, "first_step_s": 0.5},
    {"t": 1090, "event": "steps", "at": 58, "steps_s": 20, "evaluation_s": 2},
    {"t": 1091, "event": "done", "life": "bb", "step": 58})


def test_each_second_is_in_one_bucket_also_those_of_a_life_whose_rank_0_was_killed(tmp_path):
    write(tmp_path, *KILLED)
    facts = summarize(tmp_path)
    assert {name: round(seconds, 6) for name, seconds in facts["buckets"].items()} == {
        "start": 3.5 + 1.5 + 1 + 1.75, "import": 10, "rendezvous": 2, "load": 1, "restore": 0.75,
        "data_wait": 14, "steps": 0.5 + 23 + 1 + 20, "evaluation": 11, "save_stall": 2, "rescue": 4.5,
        "detection": 1.5, "down": 0, "redone": 2}
    assert facts["wall_s"] == 101 and facts["goodput"] == facts["buckets"]["steps"] / 101


def test_a_death_is_told_with_its_rank_host_pid_and_cause(tmp_path, capsys):
    write(tmp_path, *KILLED)
    assert main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["wall_s", "buckets", "goodput", "lives", "deaths"]
    (death,) = told["deaths"]
    assert {key: death[key] for key in ("rank", "host", "pid", "cause")} == {
        "rank": 0, "host": "x", "pid": 7, "cause": "was killed by SIGKILL"}
    assert main([str(tmp_path), "--by-host"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("x: 1 processes in 2 lives, deaths 1") and "y: 2 processes" in lines[-1]


@pytest.mark.parametrize("life", [
    {"rank": 1, "event": "error", "why": "ValueError: broken jpeg 37"}, None])
def test_who_raised_an_error_or_ended_without_a_word_is_dead(tmp_path, life):
    events = [event for event in KILLED if event["event"] not in ("death", "done")]
    lefts = [event for event in events if event["event"] == "left" and event["rank"] == 2]
    events = [event for event in events if event["event"] != "left"]
    write(tmp_path, *events[:4], *([{"t": 1051} | life] if life else []), *lefts, *events[4:])
    causes = {death["rank"]: death["cause"] for death in summarize(tmp_path)["deaths"]}
    assert set(causes) == {0, 1} and "without a word" in causes[0]
    assert causes[1] == (life["why"] if life else causes[0])


def test_a_run_that_was_done_and_is_started_again_tells_of_no_death(tmp_path):
    again = {"t": 2000, "event": "life", "life": "cc", "world": 1, "step": 58, "job": "k", "began": 1999}
    write(tmp_path, *KILLED[-4:], again)
    facts = summarize(tmp_path)
    assert facts["deaths"] == [] and facts["buckets"]["down"] == 1999 - 1091


def random_events(draw, steady):
    """What a run could leave that was killed, restarted and stopped, on machines whose clocks are set."""
    t, step, events = 1000.0, 0, []
    for number in range(draw.randint(1, 6)):
        began, job = t + draw.random(), draw.choice("jk")
        t = began + draw.random() * 5
        laps = {name: draw.random() * 2 for name in ("import_s", "join_s", "load_s", "restore_s")}
        life = {"t": t, "event": "life", "life": f"{number}", "world": 2, "step": step, "began": began,
                "job": job, "pids": [1, 2], "hosts": ["x", "y"]} | laps
        events.append(life if draw.random() < 0.9 else {**life, "began": None})
        for _ in range(draw.randint(0, 5)):
            step, t = step + draw.randint(0, 9), t + draw.random() * 9
            name = draw.choice(["first_step", "steps", "steps", "save", "rescue", "left", "done", "death",
                                "error"])
            fields = {"at": step, "steps_s": draw.random() * 9, "data_wait_s": draw.random(), "why": "x",
                      "stepped": t - draw.random(), "noticed": t - draw.random(), "rank": draw.randint(0, 2)}
            events.append({"t": t, "event": name, "step": step, "life": life["life"],
                           **{key: fields[key] for key in fields if draw.random() < 0.8}})
            if not steady and draw.random() < 0.05:
                t += draw.choice([-3600, 3600, -1, 0.5])  # a clock is set
        step = max(0, step - draw.randint(0, 9))
    return events


def test_the_buckets_of_any_ledger_add_up_to_the_wall_time(tmp_path):
    draw = random.Random(3)
    for _ in range(400):
        steady = draw.random() < 0.5
        events = random_events(draw, steady)
        lives_there = [event for event in events if event["event"] == "life"]
        missing = draw.choice(lives_there) if draw.random() < 0.3 and len(lives_there) > 1 else None
        lines = [json.dumps(event) for event in events if event is not missing]
        if torn := draw.random() < 0.3 and events[-1]["event"] != "life":
            lines[-1] = lines[-1][:draw.randint(1, 30)] if len(lines) > 1 else lines[-1]  # torn
        (tmp_path / "ledger.jsonl").write_text("\n".join(lines))
        facts = summarize(tmp_path)
        assert min(facts["buckets"].values()) >= 0 and 0 <= (facts["goodput"] or 0) <= 1
        assert abs(sum(facts["buckets"].values()) - facts["wall_s"]) < 1e-6
        if steady and missing is None and len(lines) == len(events):
            first, moments = events[0], [event["t"] for event in events[:-1 if torn else None]]
            assert abs(facts["wall_s"] - (max(moments) - (first["began"] or first["t"]))) < 1e-6
        assert "\n".join(report(facts)) and "\n".join(by_host(facts))


ODD = (None, "x", -1, 0, 10**30, 1e300, [], ["x"], {}, True, 1.5, float("nan"), "missing")
LIFE = {"n": 50, "seed": 3, "global_batch_size": 8, "stages": 1, "epoch": 0, "position": 0, "order": "",
        "data": "d", "options": {"lr": 1}}


def test_a_line_of_the_ledger_in_which_any_field_is_damaged_ends_no_report_and_no_start(tmp_path, capsys):
    draw, events = random.Random(1), [event | LIFE if event["event"] == "life" else event for event in KILLED]
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit/life-aa-rank0.jsonl").write_text('{"event": "begin", "step": 1, "ids": [1]}\n')
    for number, event in enumerate(events):
        for name, value in ((name, value) for name in event for value in draw.sample(ODD, 3)):
            damaged = {**event, name: value} if value != "missing" else \
                {key: event[key] for key in event if key != name}
            write(tmp_path, *events[:number], damaged, *events[number + 1:])
            history(tmp_path, "j", 47, 3000.0)
            flags = draw.choice((["--json"], ["--by-host"], [], ["--html"], ["--audit"]))
            assert main([str(tmp_path), *flags]) in (0, 1, 2), damaged
    capsys.readouterr()


def test_a_clock_measures_what_it_says(tmp_path, monkeypatch):
    now = [5000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0] + 1e6)
    clock = Clock("import")
    clock.open(Ledger(tmp_path))
    begun = now[0]
    for step, _ in enumerate(clock.timed(range(40)), 1):
        now[0] += 0.5
        clock.stepped(step)
        now[0] += 0.25  # a save
    now[0] += 3
    clock.evaluated()
    clock.close()
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    total = Counter()
    for event in events[1:]:
        total.update({name: value for name, value in event.items() if name.endswith("_s")})
    assert total == {"steps_s": 39 * 0.5, "save_stall_s": 40 * 0.25, "evaluation_s": 3}
    assert events[0]["event"] == "first_step" and events[-1]["t"] == now[0] + 1e6
    gaps = [b["t"] - a["t"] for a, b in zip(events, events[1:], strict=False)][:-2]
    assert max(gaps) <= 1.5 and now[0] - begun > 30, "a kill would lose more than a step or 1 % of this life"


class Changing(Counter):
    """As a dict that another thread adds to."""

    def items(self):
        raise RuntimeError("dictionary changed size during iteration")


def test_another_thread_may_ask_for_shares_while_the_loop_meets_a_new_bucket(tmp_path):
    clock = Clock("import")
    clock.open(Ledger(tmp_path), past=(1.0, 1.0))
    clock.stepped(1)
    clock.spent, clock.whole = Changing(), Changing()
    clock.add("steps")
    assert 0 < clock.shares()["goodput"] <= 1 and clock.shares()["data_wait"] == 0


def the_gap(tmp_path, *between, **second):
    """What the ledger tells of the time between two lives of one job, aa and bb."""
    life = {"event": "life", "world": 2, "job": "j"}
    write(tmp_path, life | {"t": 100, "life": "aa", "step": 0, "began": 98}, *between,
          life | {"t": 124, "life": "bb", "step": 9, "began": 120, "import_s": 2.5} | second)
    return summarize(tmp_path)["lives"][1]["gap"]


REST = {"start": 1.5, "import": 2.5}


def test_where_nobody_survived_the_time_since_the_last_entry_is_down(tmp_path):
    assert the_gap(tmp_path, {"t": 110, "event": "steps", "steps_s": 9, "at": 8}) == {"down": 10} | REST


def test_the_time_before_what_a_person_started_was_down(tmp_path, capsys):
    left = {"t": 110, "event": "left", "life": "aa", "rank": 0, "stepped": 109, "noticed": 109}
    assert the_gap(tmp_path, left, job="another")["down"] == 10
    assert main([str(tmp_path)]) == 0
    assert "started again after" in (out := capsys.readouterr().out) and "restarts 0\n" in out


def test_only_what_the_life_before_said_of_itself_counts(tmp_path):
    """A process that was stopped and wakes up two lives later; and words that no process would write."""
    first = {"t": 101, "event": "first_step", "step": 1}
    own = {"t": 112, "event": "left", "life": "aa", "stepped": 110.5, "noticed": 110.25}
    others = [own | {"life": "00", "t": 119}, own | {"stepped": "x"}, {"event": "left", "life": "aa"}]
    gap = the_gap(tmp_path, first, *others, own)
    assert gap == {"rescue": 1.5, "start": 9.5, "import": 2.5}


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


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', '{"options": [1]}', DEEP],
                         ids=lambda text: text[:9])
def test_damaged_files_of_a_run_cost_a_report_what_they_held_and_nothing_else(tmp_path, text, capsys):
    write(tmp_path, *KILLED)
    with open(tmp_path / "ledger.jsonl", "a") as file:
        file.write(text + "\n")
    for name in ("options.json", "metrics.jsonl", "status.json"):
        (tmp_path / name).write_text(text)
    for flags in ([], ["--json"], ["--html"]):
        assert main([str(tmp_path), *flags]) == 0, flags
    for more in ([], ["--prometheus"], ["--stale=5"]):
        assert main([str(tmp_path), "--status", *more]) == 2
    said = capsys.readouterr().err
    assert said.count("status.json is damaged") == 3 and len(said.splitlines()) == 6
    with pytest.raises(UserError, match="options.json"):
        replay.Run(tmp_path)


def test_a_command_survives_any_reader_encoding_and_disk(tmp_path):
    run = tmp_path / "\u6f22"
    run.mkdir()
    write(run, *KILLED)
    ours, theirs = os.pipe()
    os.close(ours)
    full = os.open("/dev/full", os.O_WRONLY)
    for out, flags, code, words in (
            (theirs, [], 141, ""), (full, [], 2, "No space"), (subprocess.PIPE, ["--html"], 0, ""),
            (subprocess.PIPE, ["--compare", tmp_path / "none"], 2, "none")):
        done = subprocess.run([sys.executable, "-m", "common.ledger", run, *flags], cwd=HOUSE, timeout=60,
                              stdout=out, stderr=subprocess.PIPE, encoding="latin-1",
                              env=os.environ | {"PYTHONIOENCODING": "latin-1"})
        assert done.returncode == code and words in done.stderr and "Exception" not in done.stderr, done
        if not words:
            assert done.stderr == ""
    assert run_command(lambda: exec("raise KeyboardInterrupt")) == 130
    with pytest.raises(SystemExit, match="143"):  # `finally` and `with` are run
        run_command(lambda: os.kill(os.getpid(), 15) or time.sleep(9))
