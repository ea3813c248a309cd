"""The log: each step once after any crashes, and no stream, disk or planted link that stops a training."""
import errno
import fcntl
import json
import os
import pty
import stat
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from common.ledger import Log
from common.options import Options

ROOT = Path(__file__).parents[2]


def options(run_dir, **kwargs):
    return Options(run_dir=run_dir, **{"tensorboard": False, "progress": "off"} | kwargs)


def log_for(opts, rank=0, **kwargs):
    return Log(opts, rank, **kwargs)


def life(opts, first, last, **kwargs):
    """Steps first+1..last of a run, as one process logs them; loss = step, so that a misplaced line shows."""
    with log_for(opts, first=first, **kwargs) as log:
        for step in range(first + 1, last + 1):
            log.step({"step": step, "epoch": 0, "loss": float(step), "lr": 1e-3})


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir):
    return [row["step"] for row in rows(run_dir)]


# ---- metrics.jsonl --------------------------------------------------------------------------------
def test_each_step_is_there_once_after_crashes_that_tear_lines_and_resume_earlier(tmp_path):
    opts, path = options(tmp_path), tmp_path / "metrics.jsonl"
    life(opts, 0, 5)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    life(opts, 3, 7)  # steps 4 and 5 were never saved
    with path.open("a") as file:
        file.write('{"step": 7, "loss": 7.0}\n{"step": 2, "loss": 0}\nnot JSON\n[1]\n{"loss": 1}\n')
    life(opts, 7, 9)
    life(opts, 9, 9)  # a finished run, started again
    path.write_bytes(path.read_bytes()[:-1])  # a whole line without its end
    life(opts, 9, 10)
    assert [row["loss"] for row in rows(tmp_path)] == steps(tmp_path) == [*range(1, 11)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]  # nothing left aside
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    life(opts, 0, 2)  # a fresh start keeps no line
    assert steps(tmp_path) == [1, 2]


def test_a_step_has_one_training_row_and_one_evaluation_row_with_time_and_epochs_from_1(tmp_path):
    opts = options(tmp_path)
    before = time.time()
    for first in (0, 4):  # the second life evaluates step 4 once more
        life(opts, first, 4)
        with log_for(opts, first=4) as log:
            log.evaluation(4, {"val_acc": 0.97, "val_loss": 0.1, "val_counts": [1, 2]})
    assert steps(tmp_path) == [1, 2, 3, 4, 4]
    assert all(before - 1 <= row["time"] <= time.time() for row in rows(tmp_path))
    assert rows(tmp_path)[-1].items() >= {"val_acc": 0.97, "val_loss": 0.1}.items()
    assert {row.get("epoch", 1) for row in rows(tmp_path)} == {1} and "val_counts" not in rows(tmp_path)[-1]
    life(opts, 3, 3)
    assert steps(tmp_path) == [1, 2, 3]  # evaluations of a lost step go with it


def test_the_record_a_survivor_saved_fills_the_line_its_dead_writer_left_out(tmp_path):
    opts = options(tmp_path)
    life(opts, 0, 4)
    life(opts, 5, 6, records=[{"step": 5, "epoch": 0, "loss": 5.0}])
    life(opts, 6, 7, records=[{"step": 6, "epoch": 0, "loss": 6.0}])  # this one had been written
    life(opts, 7, 8, records=[{}, {}])
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8] and rows(tmp_path)[4]["epoch"] == 1


def test_nan_is_null_because_json_has_none(tmp_path):
    with log_for(options(tmp_path)) as log:
        log.step({"step": 1, "epoch": 2, "loss": float("nan"), "acc": 0.5})
        assert rows(tmp_path)[0].items() >= {"step": 1, "epoch": 3, "loss": None, "acc": 0.5}.items()


def test_a_link_planted_at_metrics_costs_one_note_and_its_target_is_untouched(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    life(options(tmp_path), 0, 5)
    assert capsys.readouterr().err.count("cannot be written") == 1
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_costs_lines_and_one_note_and_a_torn_line_does_not_swallow_the_next(tmp_path, monkeypatch,
                                                                                        capsys):
    write, free = os.write, [1000]

    def small_disk(fd, data):
        if not free[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = write(fd, data[:free[0]])
        free[0] -= n
        return n

    monkeypatch.setattr(os, "write", small_disk)
    with log_for(options(tmp_path)) as log:
        log.step({"step": 1, "epoch": 0, "loss": 1.0})
        free[0] = 10
        for step in (2, 3, 4):
            log.step({"step": step, "epoch": 0, "loss": 1.0})
        free[0] = 1000  # somebody tidied up
        log.step({"step": 5, "epoch": 0, "loss": 1.0})
    assert capsys.readouterr().err.count("cannot be written") == 1
    monkeypatch.undo()
    life(options(tmp_path), 5, 6)
    assert steps(tmp_path) == [1, 5, 6]


# ---- the console ----------------------------------------------------------------------------------
def test_a_line_says_epoch_step_eta_lr_loss_acc_and_samples_per_second_and_the_last_one_the_result(
        tmp_path, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("common.ledger.log.time.monotonic", lambda: now[0])
    with log_for(options(tmp_path), first=100, total=564) as log:
        log.start(["net, 21,840 parameters"])
        now[0] += 1
        log.step({"step": 120, "epoch": 0, "loss": 0.48123, "acc": 0.8611, "lr": 1e-3})
        now[0] += 2
        log.step({"step": 130, "epoch": 0, "acc": 1.0, "grad_norm": 2.34567, "MiB_0": 12345})
        now[0] += 60
        log.evaluation(188, {"val_acc": 0.9712, "val_loss": 0.09})
        now[0] += 1
        log.step({"step": 189, "epoch": 1, "loss": 1.0})  # the minute of evaluation does not slow this step
        log.done(564, {"val_acc": 0.9712, "step": 188})
        log.done(564, {"val_loss": None, "step": 0})
    assert capsys.readouterr().out.splitlines() == [
        "net, 21,840 parameters",
        "epoch 1/3  step 120/564  eta 0:00:22  loss 0.4812  acc 0.861  lr 1.00e-03  1,280 samples/s",
        "epoch 1/3  step 130/564  eta 0:00:43  acc 1.000  grad_norm 2.346  MiB_0 12,345  320 samples/s",
        "step 188  val_acc 0.9712  val_loss 0.0900",
        "epoch 2/3  step 189/564  eta 0:04:30  loss 1.0000  64 samples/s",
        f"done at step 564: val_acc 0.9712 (best, step 188), {tmp_path}",
        f"done at step 564: {tmp_path}"]


def test_other_ranks_say_and_write_nothing(tmp_path, capsys):
    run_dir = tmp_path / "run"
    with log_for(options(run_dir, tensorboard=True, progress="on"), rank=1, first=3,
                 records=[{"step": 3}]) as log:
        log.start(["a"])
        log.step({"step": 4, "epoch": 0, "loss": 1.0})
        log.evaluation(4, {"val_acc": 1.0})
        log.done(4, {"step": 0})
    assert capsys.readouterr() == ("", "") and not run_dir.exists()


PROGRAM = """
import sys
from pathlib import Path
from common.ledger import Log
from common.options import Options
opts = Options(run_dir=Path(sys.argv[1]), progress=sys.argv[2], tensorboard=False)
with Log(opts, 0, total=2000) as log:
    for step in range(1, 2001):
        log.step({"step": step, "epoch": 0, "loss": 1.0})
        if step == 1500:
            log.note("caf\\xe9 \\udcff")
    log.done(2000, {"step": 0})
"""


def start(run_dir, progress, **kwargs):
    return subprocess.Popen([sys.executable, "-c", PROGRAM, run_dir, progress], cwd=ROOT, **kwargs)


def test_stdout_that_goes_away_or_fills_up_or_was_never_there_does_not_stop_the_run(tmp_path):
    ours, theirs = os.pipe()
    os.close(ours)
    full = os.open("/dev/full", os.O_WRONLY)
    for name, progress, out in (("pipe", "auto", theirs), ("full", "auto", full), ("bar", "on", full)):
        program = start(tmp_path / name, progress, stdout=out, stderr=subprocess.PIPE)
        assert program.communicate()[1] == b"" and program.returncode == 0
        assert len(steps(tmp_path / name)) == 2000
    program = start(tmp_path / "none", "auto", preexec_fn=lambda: os.close(1))
    assert program.wait() == 0 and len(steps(tmp_path / "none")) == 2000


def test_a_file_shows_lines_and_a_text_it_cannot_spell_is_escaped_not_lost(tmp_path):
    program = start(tmp_path / "a", "auto", stdout=subprocess.PIPE,
                    env=os.environ | {"PYTHONIOENCODING": "ascii:strict"})
    plain = program.communicate()[0].decode()
    assert plain.count("\n") == 2002 and "|" not in plain and "\r" not in plain
    assert "caf\\xe9 \\udcff\n" in plain and program.returncode == 0


@pytest.mark.parametrize("columns", [120, 80, 0])  # some serial lines report a width of 0
def test_a_terminal_shows_a_bar_as_wide_as_itself_with_notes_above_it_and_the_result_at_the_end(tmp_path,
                                                                                                columns):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    program = start(tmp_path / "a", "auto", stdout=theirs, env=environ | {"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # EIO: the other end is closed
        pass
    os.close(ours)
    assert program.wait() == 0
    shown = shown.decode().replace("\x1b[K", "")
    lines = shown.splitlines()
    bars = [line for line in lines if "|" in line]
    assert bars[-1].startswith("100%|██████████| epoch 1/3  step 2000/2000  eta 0:00:00")
    assert max(map(len, bars)) <= (columns or 80) - 1
    assert any(line.startswith("café") for line in lines), "a note stands on a line of its own"
    assert any(line.startswith("done at step 2000") for line in lines)


# ---- TensorBoard ----------------------------------------------------------------------------------
def test_curves_do_not_overlap_after_restarts(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    opts = options(tmp_path, tensorboard=True)
    life(opts, 0, 5)
    life(opts, 3, 4)
    with log_for(opts, first=4) as log:
        log.step({"step": 5, "epoch": 0, "loss": 50.0})
        log.evaluation(5, {"val_acc": 0.5, "val_loss": 0.7})
    board = accumulator.EventAccumulator(str(tmp_path / "tb"))
    board.Reload()

    def curve(tag):
        return [(point.step, point.value) for point in board.Scalars(tag)]

    assert curve("train/loss") == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50)]
    assert curve("val/acc") == [(5, 0.5)] and len(curve("train/lr")) == 4
    assert stat.S_IMODE((tmp_path / "tb").stat().st_mode) == 0o700


def test_a_run_with_nothing_to_add_leaves_no_curves(tmp_path):
    life(options(tmp_path, tensorboard=True), 9, 9)
    assert not (tmp_path / "tb").exists()


@pytest.mark.parametrize("cause", ["not installed", "a file in the way"])
def test_curves_that_cannot_be_written_cost_one_note(tmp_path, monkeypatch, capsys, cause):
    if cause == "not installed":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    else:
        (tmp_path / "tb").touch()
    life(options(tmp_path, tensorboard=True), 0, 5)
    assert capsys.readouterr().err.count("no curves for TensorBoard") == 1 and len(steps(tmp_path)) == 5
