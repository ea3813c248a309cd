"""The log: each step once after any crashes, and no stream and no disk that stops a training."""

import errno
import json
import os
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from jobs import ROOT, rows

from common.ledger import Log
from common.options import Options


def options(run_dir, **kwargs):
    return Options(run_dir=run_dir, **{"tensorboard": False, "progress": "off"} | kwargs)


def life(opts, first, last, **kwargs):
    """Steps first+1..last of a run, as one process logs them; loss = step, so that a misplaced line shows."""
    with closing(Log(opts, 0, first, 100, **kwargs)) as log:
        for step in range(first + 1, last + 1):
            log.step({"step": step, "epoch": 0, "loss": float(step), "lr": 1e-3})


def steps(run_dir):
    return [row["step"] for row in rows(run_dir)]


# ---- metrics.jsonl --------------------------------------------------------------------------------
def test_each_step_is_there_once_after_crashes_that_tear_lines_and_resume_earlier(tmp_path):
    opts = options(tmp_path)
    path = tmp_path / "metrics.jsonl"
    life(opts, 0, 5)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    life(opts, 3, 7)  # steps 4 and 5 were never saved
    with path.open("a") as file:
        file.write(
            '{"step": 7, "epoch": 1, "loss": 7.0}\n{"step": 2, "epoch": 1, "loss": 0}\n'
            'not JSON\n[1]\n{"loss": 1}\n'
        )
    life(opts, 7, 9)
    life(opts, 9, 9)  # a finished run, started again
    path.write_bytes(path.read_bytes()[:-1])  # a whole line without its end
    life(opts, 10, 11, records=[{}, {"step": 10, "epoch": 0, "loss": 10.0}])  # its writer had died
    life(opts, 11, 11, records=[{"step": 11, "epoch": 0, "loss": 11.0}])  # this one had been written
    assert [row["loss"] for row in rows(tmp_path)] == steps(tmp_path) == [*range(1, 12)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]  # nothing left aside
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    life(opts, 0, 2)  # a fresh start keeps no line
    assert steps(tmp_path) == [1, 2]


def test_a_start_reads_and_changes_the_end_of_a_long_file_alone(tmp_path, monkeypatch):
    opts = options(tmp_path)
    path = tmp_path / "metrics.jsonl"
    head = b'not JSON, and nobody looks here\n{"step": 1, "val_acc": 0.5}\n'
    body = b"".join(b'{"step": %d, "epoch": 1, "loss": %d.0}\n' % (step, step) for step in range(2, 9000))
    path.write_bytes(head + body)
    inode = path.stat().st_ino
    parsed = []
    loads = json.loads
    monkeypatch.setattr("json.loads", lambda *args, **given: parsed.append(1) or loads(*args, **given))
    life(opts, 8990, 8990, records=[{"step": 8990, "epoch": 0, "loss": 8990.0}, {"step": 1, "val_acc": 0.5}])
    expected = body[: body.index(b'{"step": 8991')]
    assert path.read_bytes() == head + expected and path.stat().st_ino == inode
    assert len(parsed) < 4000
    life(opts, 500, 501)  # it was another disk's checkpoint
    assert path.read_bytes().startswith(head + body[: body.index(b'{"step": 501')])
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[len(head) :])
    assert steps(tmp_path) == [*range(2, 502)]


def test_a_line_that_is_torn_in_mid_run_is_gone_when_the_next_one_is_written(tmp_path, monkeypatch):
    write = os.write
    with closing(Log(options(tmp_path), 0, 0, 100)) as log:
        for step in (1, 2, 3):
            if step == 2:
                monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:9]))
            log.step({"step": step, "epoch": 0})
            monkeypatch.undo()
        assert steps(tmp_path) == [1, 3]


def test_a_step_has_one_training_row_and_one_evaluation_row_with_time_and_epochs_from_1(tmp_path):
    opts = options(tmp_path)
    now = time.time()
    for first in (0, 4):  # the second life evaluates step 4 once more
        life(opts, first, 4)
        with closing(Log(opts, 0, 4, 100)) as log:
            metrics = {"val_acc": 0.97, "val_loss": float("nan")}
            log.evaluation({"step": 4} | metrics, metrics | {"labels": [1, 2]})
    assert steps(tmp_path) == [1, 2, 3, 4, 4]
    assert all(abs(row["time"] - now) < 60 for row in rows(tmp_path))
    assert {row.get("epoch", 1) for row in rows(tmp_path)} == {1}
    last = rows(tmp_path)[-1]
    assert last == {"step": 4, "val_acc": 0.97, "val_loss": None, "time": last["time"]}, "JSON has no nan"
    life(opts, 3, 3)
    assert steps(tmp_path) == [1, 2, 3]  # evaluations of a lost step go with it


def test_a_full_disk_costs_lines_and_one_warning_and_a_torn_line_does_not_swallow_the_next(
    tmp_path, monkeypatch, capsys
):
    write = os.write
    free = [1000]

    def small_disk(fd, data):
        if not free[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = write(fd, data[: free[0]])
        free[0] -= n
        return n

    monkeypatch.setattr(os, "write", small_disk)
    with closing(Log(options(tmp_path), 0, 0, 100)) as log:
        for step, room in ((1, 1000), (2, 10), (3, 0), (4, 0), (5, 1000)):  # somebody tidied up
            free[0] = room
            log.step({"step": step, "epoch": 0})
    assert capsys.readouterr().err.count("cannot be written") == 1
    monkeypatch.undo()
    life(options(tmp_path), 5, 6)
    assert steps(tmp_path) == [1, 5, 6]


# ---- the console ----------------------------------------------------------------------------------
def test_a_line_says_epoch_step_eta_numbers_and_samples_per_second_and_the_last_one_the_result(
    tmp_path, capsys, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr("common.ledger.log.time.monotonic", lambda: now[0])
    with closing(Log(options(tmp_path), 0, 100, 564)) as log:
        log.start(["net, 21,840 parameters"])
        now[0] += 1
        log.step({"step": 120, "epoch": 0, "loss": 0.48123, "acc": 0.8611, "lr": 1e-3})
        now[0] += 60
        metrics = {"val_acc": 0.9712, "val_loss": 0.09}
        log.evaluation({"step": 188} | metrics, metrics)
        now[0] += 1
        log.step({"step": 189, "epoch": 1, "f1": 1.23456})  # a minute of evaluation left out
        log.done(564, {"val_acc": 0.9712, "step": 188})
    assert capsys.readouterr().out.splitlines() == [
        "net, 21,840 parameters",
        "epoch 1/3  step 120/564  eta 0:00:22  loss 0.4812  acc 0.861  lr 1.00e-03  1,280 samples/s",
        "step 188  val_acc 0.9712  val_loss 0.0900",
        "epoch 2/3  step 189/564  eta 0:04:21  f1 1.235  64 samples/s",
        f"done at step 564: val_acc 0.9712 (best, step 188), {tmp_path}",
    ]


def test_other_ranks_say_and_write_nothing(run, capsys):
    opts = options(run, tensorboard=True, progress="on")
    with closing(Log(opts, 1, 3, 100, records=[{"step": 3}])) as log:
        log.start(["a"])
        log.step({"step": 4})
        log.evaluation({"step": 4}, {})
        log.done(4, {"step": 0})
    assert capsys.readouterr() == ("", "") and not opts.run_dir.exists()


PROGRAM = """
import sys
from contextlib import closing
from pathlib import Path
from common.errors import ready_streams
from common.ledger import Log
from common.options import Options
ready_streams()
opts = Options(run_dir=Path(sys.argv[1]), progress=sys.argv[2], tensorboard=False)
with closing(Log(opts, 0, 0, 2000)) as log:
    for step in range(1, 2001):
        log.step({"step": step, "epoch": 0, "loss": 1.0})
    log.note("caf\\xe9 \\udcff")
"""


@pytest.mark.parametrize(
    "kind, progress", [("pipe", "auto"), ("full", "on"), ("none", "auto"), ("ascii", "auto")]
)
def test_no_stdout_stops_a_run_with_progress_or_without(tmp_path, kind, progress):
    """A reader has left, a disk is full, there never was one, it cannot spell."""
    ours, theirs = os.pipe()
    out = os.open("/dev/full", os.O_WRONLY) if kind == "full" else theirs
    if kind == "pipe":
        os.close(ours)
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path, progress],
        cwd=ROOT,
        stderr=-1,
        stdout=-1 if kind == "ascii" else out,
        preexec_fn=(lambda: os.close(1)) if kind == "none" else None,
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict"},
    )
    shown, error = program.communicate()
    assert error == b"" and program.returncode == 0 and len(steps(tmp_path)) == 2000
    if kind == "ascii":
        assert shown.endswith(b"caf\\xe9 \\udcff\n") and shown.count(b"\n") == 2001 and b"\r" not in shown


# ---- TensorBoard ----------------------------------------------------------------------------------
def test_tensorboard_curves_do_not_overlap_after_restarts(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    opts = options(tmp_path, tensorboard=True)
    life(opts, 9, 9)
    assert not (tmp_path / "tb").exists()  # nothing to add
    life(opts, 0, 5)
    life(opts, 3, 4)
    with closing(Log(opts, 0, 4, 100)) as log:
        log.start(["resuming at step 4"])
        log.step({"step": 5, "epoch": 0, "loss": 50.0})
        log.evaluation({"step": 5, "val_acc": 0.5, "val_loss": 0.7}, {})
    board = accumulator.EventAccumulator(f"{tmp_path}/tb")
    board.Reload()
    loss, accuracy = (
        [(point.step, point.value) for point in board.Scalars(tag)] for tag in ("train/loss", "val/acc")
    )
    assert loss == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50)] and accuracy == [(5, 0.5)]
    assert len(board.Scalars("train/samples_per_s")) == 5
    (text,) = board.Tensors("run/lives/text_summary")
    assert text.step == 4 and text.tensor_proto.string_val == [b"resuming at step 4"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "tb").iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "tb").stat().st_mode) == 0o700


def test_tensorboard_curves_that_cannot_be_written_cost_one_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    life(options(tmp_path, tensorboard=True), 0, 5)
    assert capsys.readouterr().err.count("no curves for TensorBoard") == 1 and len(steps(tmp_path)) == 5


@pytest.mark.parametrize(
    "odd",
    ['{"step": "x"}', '{"step": null}', '{"step": [1], "epoch": 1}', '["step"]', '{"event":' * 100_000],
    ids=["a word", "null", "a list", "no object", "deep"],
)
def test_an_odd_line_stops_no_start_and_is_gone(tmp_path, odd):
    life(options(tmp_path), 0, 1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(f"{odd}\n")
    life(options(tmp_path), 1, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_life_changes_the_rights_of_its_own_curves_alone(tmp_path, monkeypatch):
    changed = []
    real = Path.chmod
    monkeypatch.setattr(Path, "chmod", lambda path, mode: [changed.append(path), real(path, mode)])
    for step in range(3):
        life(options(tmp_path, tensorboard=True), step, step + 1)
    assert len(changed) == len({*changed}) == 3
