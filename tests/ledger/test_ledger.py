"""The ledger survives what kills disks, and its report adds up."""

import json
import os
import re
import socket
import stat
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from jobs import PACED, ROOT, free_port, ran, rows
from ranks import fork_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.extras.lives import deaths_of, lives_of, read
from common.extras.report import BUCKETS, main, summarize
from common.ledger import Clock, Ledger, named, newest_lives
from common.ledger.ledger import lines_back
from common.options import Options
from common.place import start_of
from common.sealed import sealed


def at(t, event, **facts):
    return {"t": t, "event": event} | facts


# Rank 0 of the first life is killed after step 49; steps 48 and 49 are lost, because a survivor saved 47.
KILLED = (
    at(1000, "life", life="aa", world=3, step=0, job="j", began=990, pids=[7, 8, 9], hosts=["x", "y", "y"]),
    at(1002, "first_step", step=1),
    at(1041, "save", step=40),
    at(1050, "steps", step=49, steps_s=24, data_wait_s=14, evaluation_s=9, save_stall_s=1),
    at(1052, "death", rank=0, why="was killed by SIGKILL"),
    at(1055, "rescue", step=47, rank=2),
    at(1056, "left", life="aa", rank=1, stepped=1049),
    at(1057, "left", life="aa", rank=2, stepped=1051),
    at(1067, "life", life="bb", world=2, step=47, job="j", began=1058, pids=[5, 6], hosts=["x", "y"]),
    at(1068, "first_step", step=48),
    at(1070, "left", life="aa", rank=0, stepped=1069),  # it woke up
    at(1090, "steps", step=58, steps_s=20, evaluation_s=2),
    at(1091, "done", life="bb", step=58),
)


def write(folder, *events):
    (folder / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_each_second_is_in_one_bucket_also_those_of_a_life_whose_rank_0_was_killed(tmp_path):
    write(tmp_path, *KILLED)
    facts = summarize(tmp_path)
    assert facts["buckets"] == dict(zip(BUCKETS, [1, 0, 12 + 10, 14, 20, 11, 1, 24, 6, 2], strict=True))
    assert sum(facts["buckets"].values()) == facts["wall_s"] == 101 and facts["goodput"] == 20 / 101


def test_a_death_is_told_with_its_rank_host_pid_and_cause(tmp_path):
    write(tmp_path, *KILLED)
    (death,) = summarize(tmp_path)["deaths"]
    assert [*death.values()] == ["aa", 0, "x", 7, "was killed by SIGKILL"]
    write(tmp_path, KILLED[0], at(1051, "error", rank=1, why="ValueError: broken jpeg 37"))
    assert [death["rank"] for death in summarize(tmp_path)["deaths"]] == [1], "this life may go on"


@pytest.mark.parametrize("state", ["training", "dead", "stop", "done"])
def test_the_report_begins_with_how_the_run_is_now(tmp_path, capsys, now, state):
    alive = state == "training"
    place = {"pids": [1 if alive else 2**22 + 1], "hosts": [socket.gethostname()], "starts": [start_of(1)]}
    events = [KILLED[0] | {"world": 1} | place, at(1006, "steps", step=28), at(1007, "save", step=20)]
    if state in ("stop", "done"):
        events.append(at(1008, state))
    write(tmp_path, *events)
    assert main([str(tmp_path)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        f"{tmp_path}: {state} at step 28, 4.00 s ago; step 20 saved 3.00 s ago; 4.67 steps/s; "
        f"{int(alive)} of 1 processes alive here"
    )
    assert (second == "pids 1") == alive


def test_a_rank_is_named_that_is_the_slowest_in_most_entries_and_by_a_fifth(tmp_path):
    for entries, named_as in (
        ([(1, 1.3), (1, 1.5), (0, 9.0), (1, 1.4)], {"rank": 1, "host": "y", "times": 1.4}),
        ([(1, 1.1)] * 5, None),
        ([(1, 2.0), (0, 2.0)], None),
    ):
        events = [at(1010, "steps", step=1, slow_rank=rank, slow_times=times) for rank, times in entries]
        write(tmp_path, KILLED[0], *events)
        assert summarize(tmp_path)["now"]["slow"] == named_as


def test_one_of_three_ranks_that_is_slowed_down_is_named(jobs, run, capsys):
    words = [word for word in PACED if word != "--no-tensorboard"]
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words += [f"--run-dir={run}", "--max-steps=8"]
    ranks = [
        jobs.python("train_ddp.py", *words, **place, RANK=str(rank), PACE=pace)
        for rank, pace in enumerate(("0.1", "0.4", "0.1"))
    ]
    for job in ranks:
        job.ends_with(0)
    assert main([str(run)]) == 0
    said = re.search(r"rank 1 on (.*): (.*) x the median", capsys.readouterr().out)
    assert said[1] == socket.gethostname() and float(said[2]) > 1.5
    assert len(EventAccumulator(str(run / "tb")).Reload().Scalars("train/slow_times")) == 8
    assert not [name for row in rows(run) for name in row if "slow" in name], "they are as at any world size"


def test_the_object_for_programs_has_the_fields_that_are_documented_and_makes_a_textfile(tmp_path):
    page = (ROOT / "launch/README.md").read_text(encoding="utf-8")
    run = tmp_path / "run 'one'"
    run.mkdir()
    write(run, *KILLED)
    facts = summarize(run)
    assert facts["version"] == 1
    assert not [name for name in (*facts, *facts["now"]) if f"`{name}`" not in page]
    line = re.search(
        r"^python -m common.ledger RUN... --json (?:.*\n)*?.*training.prom$", page, re.MULTILINE
    )[0]
    words = line.replace("RUN...", '"$@"').replace("python -", f"{sys.executable} -")
    ran("bash", "-c", words, "bash", run, cwd=tmp_path, PYTHONPATH=str(ROOT))
    text = (tmp_path / "training.prom").read_text()
    assert f'training_step{{run="{run}"}} 58\n' in text
    in_alerts = {*re.findall(r"training_\w+", page)}
    assert len(in_alerts) == 4 and in_alerts <= {*re.findall(r"training_\w+", text)}


def test_a_process_is_known_by_its_start_whatever_the_wall_clock_says(tmp_path, capsys):
    pid = os.getpid()
    life = KILLED[0] | {"world": 1, "pids": [pid], "hosts": [socket.gethostname()]}
    for others in ({}, {"starts": [start_of(pid) - 1]}):
        write(tmp_path, life | others)
        assert main([str(tmp_path), "--pid=0"]) == 2
    for hour in (-3600, 0, 3600):  # by which the clock was wrong as the run began, and then set right
        write(tmp_path, life | {"t": time.time() + hour, "starts": [start_of(pid)]})
        assert main([str(tmp_path), "--pid=0"]) == 0 and capsys.readouterr().out == f"{pid}\n"


def test_a_run_on_another_machine_is_not_called_training_for_ever(tmp_path, capsys, now):
    write(tmp_path, KILLED[0])
    assert summarize(tmp_path)["now"]["state"] == "training"
    now.seconds = 700.0
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert ": silent at" in said and "last heard of 0:11:40 ago, from x, y: look there" in said


def test_the_next_life_names_the_machine_that_died(jobs, run):
    def train(steps):
        words = [*PACED, f"--run-dir={run}", f"--max-steps={steps}"]
        return jobs.python("train_ddp.py", *words, TORCHELASTIC_RUN_ID="one job", PACE="0").ends_with(0)

    train(2)
    path = run / "ledger.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"done"' not in line and '"left"' not in line]
    path.write_text("\n".join(kept).replace(json.dumps([socket.gethostname()]), '["node3"]') + "\n")
    lost = "\nrank 0 on node3 ended without a word (killed, or its machine is gone)\nresuming"
    assert lost in train(3)


def test_of_several_runs_each_has_a_row_with_its_best_and_what_differs(tmp_path, capsys):
    expected = []
    for rate in (0.1, 0.3):
        run = tmp_path / str(rate)
        run.mkdir()
        write(run, *KILLED, at(1090, "best", best={"acc": rate, "loss": 0.5, "step": 58}))
        (run / "options.json").write_bytes(sealed({"options": Options(run_dir=run, lr=rate).to_json()}))
        expected.append(f"{run}: done at step 58  best acc {rate}000 at step 58  lr {rate}")
    runs = [str(path) for path in sorted(tmp_path.iterdir())]
    assert main(runs) == 0
    assert capsys.readouterr().out.splitlines() == expected
    assert main([*runs, "--html=page"]) == 2


def test_each_machine_writes_a_file_of_its_own_and_all_are_read_as_one(tmp_path, monkeypatch, now):
    """Two clients of NFS that append to one file overwrite each other's lines."""
    monkeypatch.setattr(socket, "gethostname", lambda: "y")
    ledgers = {rank: Ledger(tmp_path, rank, local_rank) for rank, local_rank in enumerate((0, 1, 0, 1))}
    for life in ("aa", "bb"):
        ledgers[0].event("life", life=life, step=0, world=4)
        for rank in (2, 0, 3, 1):
            now.seconds += 1
            ledgers[rank].event("left", life=life, stepped=0)
        now.seconds += 1
    assert sorted(os.listdir(tmp_path)) == ["ledger-y.jsonl", "ledger.jsonl"]
    for lives in (lives_of(tmp_path), newest_lives(tmp_path)):
        assert [[event["rank"] for event in named(life, "left")] for life in lives] == [[2, 0, 3, 1]] * 2


def test_a_torn_line_costs_what_it_held_and_a_damaged_event_ends_no_report_and_no_start(tmp_path):
    write(tmp_path, *KILLED)
    lives = lives_of(tmp_path)
    left = '{"t": TIME, "event": "left", "rank": 1, "stepped": 9}\n'
    odd = [left.replace("TIME", time) for time in ('"x"', "null", "[1]")]
    torn = 'null\n{"options": [1]}\n{"event": "st'
    (tmp_path / "ledger-y.jsonl").write_text("".join([*odd, torn]))
    assert lives_of(tmp_path) == lives and len([*newest_lives(tmp_path)]) == 2
    for number, event in enumerate(KILLED):
        for name in event:
            damaged = {key: value for key, value in event.items() if key != name}
            if name == "event":
                damaged[name] = []
            write(tmp_path, *KILLED[:number], damaged, *KILLED[number + 1 :])
            for life in newest_lives(tmp_path):  # as a start does
                deaths_of(life, over=True)
            assert main([str(tmp_path)]) in (0, 2)


@pytest.mark.parametrize("block", [1, 7, 100, 1 << 16])
def test_a_file_is_read_from_its_end_line_by_line_wherever_a_block_ends(tmp_path, monkeypatch, block):
    monkeypatch.setattr("common.ledger.ledger.BLOCK_BYTES", block)
    path = tmp_path / "lines"
    assert [*lines_back(path)] == []
    for data in (b"", b"\n", b"a", b"ab\ncde\n\nf" * 30, b"x" * 300 + b"\n"):
        path.write_bytes(data)
        assert [line for _, line in lines_back(path)] == data.split(b"\n")[::-1]
        assert all(data[at:].startswith(line) for at, line in lines_back(path))


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_what_is_no_file_keeps_no_start_and_no_step_waiting_and_ends_none(tmp_path, plant):
    plant(tmp_path / "ledger.jsonl")
    assert [*newest_lives(tmp_path)] == [] and main([str(tmp_path)]) == 2
    ledger = Ledger(tmp_path)
    for step in range(2000):  # more than a pipe takes
        ledger.event("save", step=step)
    ledger.lines.close()


def test_a_start_reads_the_last_lives_of_a_ledger_and_not_the_clock_of_months(tmp_path, monkeypatch):
    entries = [at(t, "steps", life="bb", step=50) for t in range(1069, 4000)]
    write(tmp_path, *KILLED[:8] * 300, *KILLED[8:10], *entries)
    parse = Mock(side_effect=json.loads)
    monkeypatch.setattr("json.loads", parse)
    lives = newest_lives(tmp_path)
    assert next(lives) == [*KILLED[8:10], entries[-1]], "it tells when a life was heard of last"
    assert next(lives) == [event for event in KILLED[:8] if event["event"] != "steps"]
    assert parse.call_count < 20


@pytest.fixture
def clock(tmp_path, now):
    clock = Clock()
    clock.ledger = Ledger(tmp_path)
    return clock


def test_a_clock_measures_what_it_says(tmp_path, now, clock):
    for step, _ in enumerate(clock.timed(range(40)), 1):
        now.seconds += 0.5
        clock.stepped(step)
        now.seconds += 0.25  # a save
    now.seconds += 3
    clock.add("evaluation")
    clock.write_down()
    first, *entries = read(tmp_path / "ledger.jsonl")
    total = Counter()
    for entry in entries:
        total.update({name: seconds for name, seconds in entry.items() if name.endswith("_s")})
    assert total == {"steps_s": 39 * 0.5, "save_stall_s": 40 * 0.25, "evaluation_s": 3, "data_wait_s": 0}
    assert first["event"] == "first_step" and len(entries) > 30, "a kill would lose more than a step or two"


@pytest.mark.parametrize("jump", [0, -1e6, 1e6])
def test_an_old_life_has_an_entry_a_minute_and_loses_no_second_though_its_wall_clock_jumps(
    tmp_path, now, clock, jump
):
    now.ahead += jump
    for step in range(7200):
        now.seconds += 1
        clock.stepped(step)
    clock.write_down()
    _, *entries = read(tmp_path / "ledger.jsonl")
    seconds = [entry["steps_s"] for entry in entries]
    assert sum(seconds) == 7199 and max(seconds) <= 61 and 300 < len(entries) < 500


def test_the_page_of_a_run_holds_its_curves_deaths_and_lives_and_asks_for_nothing_else(tmp_path):
    """The seconds until the next command was typed are no price of a death: they are left out of its bars."""
    write(tmp_path, *KILLED[:8], KILLED[8] | {"job": "another"}, *KILLED[9:])
    rows = "".join(f'{{"step": {step}, "epoch": 1, "loss": 0.5}}\n' for step in range(9000))
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert main([str(tmp_path), "--html=page"]) == 0
    text = Path("page").read_text()
    data = json.loads(text.partition("const run = ")[2].partition("\n")[0])
    assert data["rows"][0]["loss"] == 0.5 and 2000 < len(data["rows"]) <= 4000
    assert [len(data[name]) for name in ("lives", "deaths", "rescues")] == [2, 1, 1]
    for buckets in (data["buckets"], data["lives"][1]["buckets"]):
        assert (buckets["paused"], buckets["down"]) == (1, 0)
    assert text.count("http") == 1 and "src=" not in text  # the name space of SVG


def test_events_are_private_lines_a_torn_one_joins_no_other_and_a_planted_link_is_not_followed(
    tmp_path, capsys
):
    path = tmp_path / "new" / "ledger.jsonl"
    Ledger(tmp_path / "new").event("save", where=Path("a\nb"))
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    with path.open("a") as file:
        file.write('{"event": "save", "st')
    Ledger(tmp_path / "new").event("life")
    assert [event["event"] for event in read(path)] == ["save", "life"]
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "elsewhere")
    book = Ledger(tmp_path)
    book.event("save")
    book.event("save")
    assert capsys.readouterr().err.count("warning") == 1 and not (tmp_path / "elsewhere").exists()


def write_many(world, folder):
    book = Ledger(folder)
    for step in range(200):
        book.event("save", step=step, ids=list(range(500)))


def test_lines_of_many_writers_do_not_mix(tmp_path):
    fork_ranks(4, write_many, tmp_path)
    steps = Counter(line["step"] for line in read(tmp_path / "ledger.jsonl"))
    assert steps == dict.fromkeys(range(200), 4)
