"""The ledger survives what kills disks, and its report adds up."""

import io
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from jobs import PACED, free_port, ran
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.extras.report import BUCKETS, main, summarize
from common.ledger import Clock, Ledger, deaths_of, lives_of, named, newest_lives
from common.ledger.ledger import lines_back, read
from common.options import Options
from common.place import start_of
from common.sealed import sealed

HOUSE = Path(__file__).parents[2]


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
    assert [*facts["buckets"].items()] == [
        *zip(BUCKETS, [1, 0, 12 + 10, 14, 20, 11, 1, 24, 6, 2], strict=True),
    ]
    assert facts["wall_s"] == 101 and facts["goodput"] == 20 / 101


def test_no_second_is_in_two_buckets_though_two_parts_claim_it(tmp_path):
    """An entry on the way out holds seconds of the rescue; a life may begin while the last one ends."""
    life = KILLED[0] | {"t": 8, "life": "aa", "began": 0}
    write(
        tmp_path,
        life,
        at(19, "steps", step=5, steps_s=5, save_stall_s=4),
        at(20, "left", life="aa", rank=0, stepped=15),
        life | {"t": 22, "life": "bb", "began": 14, "step": 5},
        at(24, "done", step=6),
    )
    first, second = (
        {name: seconds for name, seconds in life["buckets"].items() if seconds}
        for life in summarize(tmp_path)["lives"]
    )
    assert first == {"start": 8, "steps": 5, "save_stall": 4, "rescue": 3}
    assert second == {"start": 2, "other": 2}


def test_a_death_is_told_with_its_rank_host_pid_and_cause(tmp_path, capsys):
    write(tmp_path, *KILLED)
    assert main([str(tmp_path), "--json"]) == 0
    (death,) = json.loads(capsys.readouterr().out)["deaths"]
    assert [*death.values()] == ["aa", 0, "x", 7, "was killed by SIGKILL"]
    past = [event for event in KILLED[:8] if event["event"] != "death"]
    write(tmp_path, *past, at(1051, "error", rank=1, why="ValueError: broken jpeg 37"))
    assert [death["rank"] for death in summarize(tmp_path)["deaths"]] == [1], "this life may go on"


@pytest.mark.parametrize(
    "state, more",
    [("training", []), ("dead", []), ("stop", [{"event": "stop"}]), ("done", [{"event": "done"}])],
)
def test_the_report_begins_with_how_the_run_is_now(tmp_path, capsys, state, more):
    began = time.time() - 10
    pid = 1 if state == "training" else 2**22 + 1
    places = {"pids": [pid], "hosts": [socket.gethostname()], "starts": [start_of(1)]}
    write(
        tmp_path,
        KILLED[0] | {"t": began, "world": 1} | places,
        at(began + 2, "steps", step=8),
        at(began + 6, "steps", step=28),
        at(began + 7, "save", step=20),
        *({"t": began + 8} | event for event in more),
    )
    assert main([str(tmp_path)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    number = r"(\d+\.\d\d)"
    ages = re.fullmatch(
        f"{tmp_path}: {state} at step 28, {number} s ago; step 20 saved {number} s ago; "
        f"4.67 steps/s; {int(state == 'training')} of 1 processes alive here",
        first,
    )
    assert 4 <= float(ages[1]) < 60 and 3 <= float(ages[2]) < 60
    assert (second == f"pids {pid}") == (state == "training")
    found = main([str(tmp_path), "--pid=0"])
    assert found == (0 if state == "training" else 2)
    said = capsys.readouterr()
    assert said.out == "1\n" if found == 0 else f"rank 0 does not run on this machine ({state})" in said.err
    assert main([str(tmp_path), "--pid=1"]) == 2


def test_a_rank_is_named_that_is_the_slowest_in_most_entries_and_by_a_fifth(tmp_path, capsys):
    entries = [(1, 1.3), (1, 1.5), (0, 9.0), (1, 1.4)]

    def told(entries):
        events = [
            at(1010 + i, "steps", step=i, slow_rank=r, slow_times=x) for i, (r, x) in enumerate(entries)
        ]
        write(tmp_path, KILLED[0], at(1003, "steps", step=1), *events)
        assert main([str(tmp_path)]) == 0
        report = capsys.readouterr().out
        page, _ = page_of(tmp_path)
        slow = summarize(tmp_path)["now"]["slow"]
        line = "rank 1 on y: 1.4 x the median"
        assert (line in report) == (line in page) == bool(slow)
        return slow

    assert told(entries) == {"rank": 1, "host": "y", "times": 1.4}
    assert told([(1, 1.1)] * 5) is None and told([(1, 2.0), (0, 2.0)]) is None and told([]) is None


def test_one_of_three_ranks_that_is_slowed_down_is_named(jobs, tmp_path):
    run = tmp_path / "run"
    words = ["train_ddp.py", *PACED, f"--run-dir={run}", "--max-steps=8"]
    words.remove("--no-tensorboard")
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        jobs.python(*words, **place, RANK=str(rank), PACE=pace)
        for rank, pace in enumerate(("0.1", "0.4", "0.1"))
    ]
    for job in ranks:
        job.ends_with(0)
    slow = summarize(run)["now"]["slow"]
    assert (slow["rank"], slow["host"]) == (1, socket.gethostname()) and slow["times"] > 1.5
    curves = EventAccumulator(str(run / "tb")).Reload()
    points = [(point.step, point.value) for point in curves.Scalars("train/slow_times")]
    assert [step for step, _ in points] == [*range(1, 9)] and sum(times > 1.5 for _, times in points) > 4
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not [name for row in rows for name in row if "slow" in name], "they are as at any world size"


def test_the_object_for_programs_has_the_fields_that_are_documented_and_makes_a_textfile(tmp_path):
    page = (HOUSE / "launch/README.md").read_text(encoding="utf-8")
    run = tmp_path / "run 'one'"
    run.mkdir()
    write(run, *(event for event in KILLED if event["event"] not in ("stop", "done")))
    facts = summarize(run)
    assert facts["version"] == 1
    for name in (*facts, *facts["now"]):
        assert f"`{name}`" in page, name
    done = tmp_path / "done"
    done.mkdir()
    write(done, *KILLED, at(time.time() - 3600, "done", step=60))
    line = re.search(
        r"^python -m common.ledger RUN... --json (?:.*\n)*?.*training.prom$", page, re.MULTILINE
    )[0]
    words = line.replace("RUN...", '"$@"').replace("python -", f"{sys.executable} -")
    ran("bash", "-c", f"cd {tmp_path} && PYTHONPATH={HOUSE} {words}", "bash", run, done)
    rows = (tmp_path / "training.prom").read_text().splitlines()
    numbers = dict(row.rsplit(" ", 1) for row in rows)
    assert len(numbers) == len(rows), "two runs on one node have lines of their own"
    of = {
        name: lambda what, name=name: float(numbers[f'training_{what}{{run="{tmp_path}/{name}"}}'])
        for name in ("run 'one'", "done")
    }
    assert of["run 'one'"]("step") == 58 and of["run 'one'"]("starts") == 2
    alerts = re.findall(r"^# (.*training_\w+.*?)   ", page, re.MULTILINE)
    assert len(alerts) == 3

    def calls(alert, name):
        alert = re.sub(r"increase\((\w+)\[1h\]\)", r"\1", alert)
        return eval(re.sub(r"training_(\w+)", r"value('\1')", alert), {"value": of[name]})

    assert [calls(alert, "run 'one'") for alert in alerts] == [True, False, True]
    assert [calls(alert, "done") for alert in alerts] == [False] * 3, "nobody is called for a good end"


def test_a_process_is_known_by_its_start_whatever_the_wall_clock_says(tmp_path, capsys):
    life = KILLED[0] | {"world": 1, "pids": [os.getpid()], "hosts": [socket.gethostname()]}
    for others in ({}, {"starts": [start_of(os.getpid()) - 1]}):  # another one that had the number
        write(tmp_path, life | {"t": time.time()} | others)
        assert main([str(tmp_path), "--pid=0"]) == 2
        assert summarize(tmp_path)["now"]["state"] == "dead"
    hour = 3600  # by which the clock was wrong as the run began, and then set right
    for t in (time.time() - hour, time.time(), time.time() + hour):
        write(tmp_path, life | {"t": t, "starts": [start_of(os.getpid())]})
        assert main([str(tmp_path), "--pid=0"]) == 0
        assert capsys.readouterr().out == f"{os.getpid()}\n"


def test_a_run_on_another_machine_is_not_called_training_for_ever(tmp_path, capsys):
    life = KILLED[0] | {"t": time.time() - 5}
    write(tmp_path, life)
    assert summarize(tmp_path)["now"]["state"] == "training"
    write(tmp_path, life | {"t": time.time() - 700})
    assert summarize(tmp_path)["now"]["state"] == "silent"
    assert main([str(tmp_path)]) == 0
    assert "last heard of 0:11:40 ago, from x, y: look there" in capsys.readouterr().out


def test_the_next_life_names_the_machine_that_died_and_a_damaged_line_of_the_last_one_ends_no_start(
    jobs, tmp_path
):
    def train(steps):
        words = [*PACED, "--run-dir", tmp_path / "run", "--lr-schedule=cosine", "--max-steps", steps]
        return jobs.python("train_ddp.py", *words, TORCHELASTIC_RUN_ID="one job", PACE="0").ends_with(0)

    train(2)
    path = tmp_path / "run/ledger.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"done"' not in line and '"left"' not in line]
    path.write_text("\n".join(kept).replace(json.dumps([socket.gethostname()]), '["node3"]') + "\n")
    lost = "\nrank 0 on node3 ended without a word (killed, or its machine is gone)\nresuming"
    assert lost in train(3)
    path.write_text(path.read_text().replace('"epochs"', '"epochz"'))
    train(4)


def test_of_several_runs_each_has_a_row_with_its_best_and_what_differs(tmp_path, capsys):
    runs = [tmp_path / name for name in ("low", "high")]
    for run, rate in zip(runs, (0.1, 0.3), strict=True):
        opts = Options(run_dir=run, lr=rate)
        run.mkdir()
        write(run, *KILLED, {"t": 1090, "event": "best", "best": {"acc": rate, "loss": 0.5, "step": 58}})
        (run / "options.json").write_bytes(sealed({"options": opts.to_json()}))
    assert main([*map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{runs[0]}: done at step 58  best acc 0.1000 at step 58  lr 0.1",
        f"{runs[1]}: done at step 58  best acc 0.3000 at step 58  lr 0.3",
    ]
    assert main([*map(str, runs), "--html=page"]) == 2


def test_each_machine_writes_a_file_of_its_own_and_all_are_read_as_one(tmp_path, monkeypatch):
    """Two clients of NFS that append to one file overwrite each other's lines."""
    clock = iter(range(1000, 2000))
    monkeypatch.setattr("common.ledger.ledger.time.time", lambda: next(clock))
    machines = {}
    for rank, local_rank, host in ((0, 0, "x"), (1, 1, "x"), (2, 0, "y"), (3, 1, "y")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        machines[rank] = Ledger(tmp_path, rank, local_rank, life="aa")
    for life in ("aa", "bb"):
        facts = {"pids": [5, 6, 7, 8], "hosts": [*"xxyy"], "world": 4, "began": 990}
        machines[0].event("life", life=life, step=0, **facts)
        for rank in (2, 0, 3, 1):
            machines[rank].event("left", life=life, stepped=0)
    assert sorted(os.listdir(tmp_path)) == ["ledger-y.jsonl", "ledger.jsonl"]
    for lives in (lives_of(tmp_path), [*newest_lives(tmp_path)][::-1]):
        assert [[event["rank"] for event in named(life, "left")] for life in lives] == [[2, 0, 3, 1]] * 2
        assert not [death for life in lives for death in deaths_of(life, over=True)]


@pytest.mark.parametrize("t", ['"x"', "null", "[1]"])
def test_an_event_of_no_time_stops_no_start_that_reads_two_machines(tmp_path, t):
    write(tmp_path, *KILLED)
    (tmp_path / "ledger-y.jsonl").write_text(f'{{"t": {t}, "event": "left", "rank": 1, "stepped": 9}}\n')
    assert len([*newest_lives(tmp_path)]) == len(lives_of(tmp_path)) == 2


def test_a_torn_line_costs_what_it_held_and_a_damaged_event_ends_no_report_and_no_start(tmp_path):
    write(tmp_path, *KILLED)
    facts = summarize(tmp_path) | {"now": None}
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('null\n{"options": [1]}\n{"event": "st')
    assert summarize(tmp_path) | {"now": None} == facts
    for number, event in enumerate(KILLED):
        for name in event.keys() - {"event"}:
            damaged = {key: value for key, value in event.items() if key != name}
            write(tmp_path, *KILLED[:number], damaged, *KILLED[number + 1 :])
            deaths = [deaths_of(life, over=True) for life in lives_of(tmp_path)]  # as a start does
            assert deaths and main([str(tmp_path)]) in (0, 2)
            lives_of(tmp_path, tmp_path / "another node's")


@pytest.mark.parametrize("block", [1, 7, 100, 1 << 16])
def test_a_file_is_read_from_its_end_line_by_line_wherever_a_block_ends(tmp_path, monkeypatch, block):
    monkeypatch.setattr("common.ledger.ledger.BLOCK_BYTES", block)
    path = tmp_path / "lines"
    assert [*lines_back(path)] == []
    for data in (b"", b"\n", b"a", b"ab\ncde\n\nf" * 30, b"x" * 300 + b"\n"):
        path.write_bytes(data)
        lines = data.split(b"\n")
        assert [line for _, line in lines_back(path)] == lines[::-1]
        assert all(data[at : at + len(line)] == line for at, line in lines_back(path))


def test_a_line_longer_than_many_blocks_is_not_read_block_by_block(tmp_path, monkeypatch):
    reads = []

    class Counted(io.FileIO):
        def read(self, size):
            reads.append(size)
            return super().read(size)

    monkeypatch.setattr(
        "common.ledger.ledger.open", lambda path, mode, **how: Counted(path, **how), raising=False
    )
    path = tmp_path / "lines"
    path.write_bytes(b"a\n" + bytes(100 << 16) + b"\nb")
    assert [line[:1] for _, line in lines_back(path)] == [b"b", b"\0", b"a"] and len(reads) < 20


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_what_is_no_file_keeps_no_start_and_no_step_waiting_and_ends_none(tmp_path, plant):
    plant(tmp_path / "ledger.jsonl")
    assert [*newest_lives(tmp_path)] == [] and main([str(tmp_path)]) == 2
    ledger = Ledger(tmp_path)
    for step in range(2000):  # more than a pipe takes
        ledger.event("save", step=step)
    ledger.lines.close()


def test_a_start_reads_the_last_lives_of_a_ledger_and_not_the_clock_of_months(tmp_path, monkeypatch):
    entries = [{"t": t, "event": "steps", "life": "bb", "step": 50} for t in range(1069, 4000)]
    write(tmp_path, *KILLED[:8] * 300, *KILLED[8:-1], *entries, KILLED[-1])
    old, new = lives_of(tmp_path)[-2:]
    parsed = []
    monkeypatch.setattr("json.loads", lambda text, loads=json.loads: parsed.append(1) or loads(text))
    lives = newest_lives(tmp_path)
    assert [event for event in new if event["event"] != "steps"] == next(lives)
    assert [event for event in old if event["event"] != "steps"] == next(lives)
    assert len(parsed) < 20
    assert len([*lives]) == 299
    write(tmp_path, *KILLED[:8], *KILLED[8:-1], *entries)
    assert next(newest_lives(tmp_path))[-1] == entries[-1], "it tells when a life was heard of last"


@pytest.fixture
def now(monkeypatch):
    """[what time.monotonic says]."""
    now = [5000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0] + 1e6)
    return now


@pytest.fixture
def clock(tmp_path, now):
    clock = Clock()
    clock.ledger = Ledger(tmp_path)
    return clock


def test_a_clock_measures_what_it_says(tmp_path, now, clock):
    for step, _ in enumerate(clock.timed(range(40)), 1):
        now[0] += 0.5
        clock.stepped(step)
        now[0] += 0.25  # a save
    now[0] += 3
    clock.add("evaluation")
    clock.write_down()
    first, *entries = read(tmp_path / "ledger.jsonl")
    total = {name: sum(entry.get(name, 0) for entry in entries) for name in entries[0] if name.endswith("_s")}
    assert total == {"data_wait_s": 0, "steps_s": 39 * 0.5, "save_stall_s": 40 * 0.25}
    assert entries[-1]["evaluation_s"] == 3 and first["event"] == "first_step"
    moments = [entry["t"] for entry in entries]
    assert moments[-1] == now[0] + 1e6 and len(entries) > 30, "a kill would lose more than a step or two"


@pytest.mark.parametrize("jump", [0, -1e6, 1e6])
def test_a_wall_clock_that_jumps_makes_no_line_a_step(tmp_path, monkeypatch, now, clock, jump):
    monkeypatch.setattr(time, "time", lambda: now[0] + 1e6 + jump)
    for step in range(1000):
        now[0] += 0.1
        clock.stepped(step)
    assert 50 < len([*read(tmp_path / "ledger.jsonl")]) < 300


def test_an_old_life_has_an_entry_of_its_clock_a_minute_and_loses_no_second(tmp_path, now, clock):
    for step in range(7200):
        now[0] += 1
        clock.stepped(step)
    clock.write_down()
    first, *entries = read(tmp_path / "ledger.jsonl")
    assert sum(entry["steps_s"] for entry in entries) == 7199
    ends = [entry["t"] - first["t"] for entry in entries]
    assert max(b - a for a, b in zip(ends, ends[1:], strict=False)) <= 61
    assert sum(end > 3600 for end in ends) < 75 and sum(end < 3600 for end in ends) > 250


def test_a_clock_needs_no_proc(monkeypatch):
    monkeypatch.setattr("common.place._state", lambda pid: (None, None))
    assert abs(Clock().began - time.time()) < 60


def page_of(run):
    """(the text, its data)."""
    assert main([str(run), "--html=page"]) == 0
    text = Path("page").read_text()
    return text, json.loads(text.partition("const run = ")[2].partition("\n")[0])


def test_the_page_of_a_run_holds_its_curves_deaths_and_lives_and_asks_for_nothing_else(tmp_path):
    write(tmp_path, *KILLED)
    rows = "".join(f'{{"step": {step}, "epoch": 1, "loss": 0.5}}\n' for step in range(9000))
    (tmp_path / "metrics.jsonl").write_text(rows)
    text, data = page_of(tmp_path)
    assert data["rows"][0]["loss"] == 0.5 and 2000 < len(data["rows"]) <= 4000
    assert [len(data[name]) for name in ("lives", "deaths", "rescues")] == [2, 1, 1]
    assert text.count("http") == 1 and "src=" not in text  # the name space of SVG


@pytest.mark.parametrize("job, paused, down", [("j", 0, 1), ("another", 1, 0)])
def test_the_seconds_until_the_next_command_was_typed_are_no_price_of_a_death(tmp_path, job, paused, down):
    write(tmp_path, *(event | ({"job": job} if event.get("life") == "bb" else {}) for event in KILLED))
    facts = summarize(tmp_path)
    for buckets in (facts["buckets"], facts["lives"][1]["buckets"]):
        assert (buckets["paused"], buckets["down"]) == (paused, down)
    assert sum(facts["buckets"].values()) == facts["wall_s"] == 101


def test_events_are_private_lines_a_torn_one_joins_no_other_and_a_planted_link_is_not_followed(
    tmp_path, capsys
):
    path = tmp_path / "new" / "ledger.jsonl"
    Ledger(tmp_path / "new").event("save", step=3, where=Path("a\nb"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with path.open("a") as file:
        file.write('{"event": "save", "st')
    Ledger(tmp_path / "new").event("life")
    first, second = read(path)
    assert (first["step"], first["where"], second["event"]) == (3, "a\nb", "life")
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "elsewhere")
    book = Ledger(tmp_path)
    book.event("save")
    book.event("save")
    assert capsys.readouterr().err.count("warning") == 1 and not (tmp_path / "elsewhere").exists()


def test_lines_of_many_writers_do_not_mix(tmp_path):
    program = (
        "import sys; from pathlib import Path; from common.ledger import Ledger\n"
        "book = Ledger(Path(sys.argv[1]))\n"
        "for k in range(200): book.event('save', step=k, ids=list(range(500)))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=HOUSE) for _ in range(4)]
    assert not any(writer.wait(timeout=300) for writer in writers)
    lines = list(read(tmp_path / "ledger.jsonl"))
    assert Counter(line["step"] for line in lines) == dict.fromkeys(range(200), 4)


def test_a_command_survives_a_reader_that_leaves_and_any_encoding(tmp_path):
    run = tmp_path / "\u6f22"
    run.mkdir()
    write(run, *KILLED)
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "common.ledger", run],
        cwd=HOUSE,
        stdout=theirs,
        stderr=-1,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (141, b"")
