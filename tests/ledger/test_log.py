"""The log: each step once after any crashes, and no stream, disk or planted link that stops a training."""
import errno
import fcntl
import json
import os
import pty
import re
import stat
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from common.ledger import Log
from common.options import Options

ROOT = Path(__file__).parents[2]


@dataclass
class State:
    step: int
    epoch: int = 0
    position: int = 0


def options(run_dir, **kwargs):
    return Options(run_dir=run_dir, **{"tensorboard": False, "progress": "off"} | kwargs)


def log_for(opts, rank=0, **kwargs):
    return Log(opts, SimpleNamespace(rank=rank), **kwargs)


def life(opts, first, last, **kwargs):
    """Steps first+1..last of a run, as one process logs them; value = step, so that a misplaced line shows.
    """
    with log_for(opts, state_step=first, **kwargs) as log:
        for step in range(first + 1, last + 1):
            log.step(State(step, 0, step * 64), {"loss": float(step), "lr": 1e-3})


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir):
    return [line["step"] for line in lines(run_dir)]


# ---- metrics.jsonl --------------------------------------------------------------------------------
def test_each_step_is_there_once_after_crashes_that_tear_lines_and_resume_earlier(tmp_path):
    opts, path = options(tmp_path), tmp_path / "metrics.jsonl"
    life(opts, 0, 5)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    life(opts, 3, 7)  # steps 4 and 5 were never saved
    with path.open("a") as file:
        file.write('{"step": 7, "loss": 7.0}\n{"step": 2, "loss": 0}\nnot JSON\n[1]\n{"loss": 1}\n{"step": '
                   '"8"}\n')
    life(opts, 7, 9)
    life(opts, 9, 9)  # a finished run, started again
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [line["loss"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]  # nothing left aside


def test_a_step_logged_again_in_the_same_life_is_not_written_again(tmp_path):
    with log_for(options(tmp_path)) as log:
        for step in (1, 2, 2, 1, 3):
            log.step(State(step), {"loss": 0.5})
    assert steps(tmp_path) == [1, 2, 3]


def test_a_step_has_one_training_line_and_one_evaluation_line(tmp_path):
    opts = options(tmp_path)
    for first in (0, 4):  # the second life evaluates step 4 once more
        life(opts, first, 4)
        with log_for(opts, state_step=4) as log:
            log.evaluation(State(4), {"val_acc": 0.97, "val_loss": 0.1})
    assert lines(tmp_path)[-1] == {"step": 4, "val_acc": 0.97,
                                   "val_loss": 0.1} and steps(tmp_path) == [1, 2, 3, 4, 4]
    life(opts, 3, 3)
    assert steps(tmp_path) == [1, 2, 3]  # evaluations of a lost step go with it


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    life(options(tmp_path), 0, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    life(options(tmp_path), 2, 3)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_file_that_was_cleaned_is_still_private(tmp_path):
    life(options(tmp_path), 0, 2)
    life(options(tmp_path), 1, 2)
    assert stat.S_IMODE((tmp_path / "metrics.jsonl").stat().st_mode) == 0o600


def test_the_record_a_survivor_saved_fills_the_line_its_dead_writer_left_out(tmp_path):
    opts = options(tmp_path)
    life(opts, 0, 4)
    life(opts, 5, 6, records=[{"step": 5, "epoch": 0, "loss": 5.0}])
    life(opts, 6, 7, records=[{"step": 6, "epoch": 0, "loss": 6.0}])  # this one had been written
    life(opts, 7, 8, records=[{}, {}])
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_fresh_start_in_an_old_run_dir_keeps_none_of_its_lines(tmp_path):
    life(options(tmp_path), 0, 5)
    life(options(tmp_path), 0, 2)
    assert steps(tmp_path) == [1, 2]


def test_nan_is_null_because_json_has_none_and_numbers_of_torch_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    with log_for(options(tmp_path)) as log:
        log.step(State(1), {"loss": float("nan"), "acc": torch.tensor(0.5)})
    assert lines(tmp_path) == [{"step": 1, "epoch": 0, "loss": None, "acc": 0.5}]


def test_run_folder_and_file_are_private_and_a_line_is_there_at_once(tmp_path):
    run_dir = tmp_path / "runs" / "a"
    with log_for(options(run_dir)) as log:
        log.step(State(1), {"loss": 1.0})
        assert steps(run_dir) == [1]
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "metrics.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_link_planted_at_metrics_is_refused_and_its_target_untouched(tmp_path, target):
    (tmp_path / "victim").write_text("precious")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").symlink_to(tmp_path / target)
    with pytest.raises(UserError, match="not followed\nremove it"):
        log_for(options(run_dir))
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_a_planted_fifo_or_tb_link_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="no plain file"):
        log_for(options(tmp_path))
    os.unlink(tmp_path / "metrics.jsonl")
    (tmp_path / "tb").symlink_to("/")
    with pytest.raises(UserError, match="tb is a link"):
        log_for(options(tmp_path, tensorboard=True))


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
        log.step(State(1), {"loss": 1.0})
        free[0] = 10
        for step in (2, 3, 4):
            log.step(State(step), {"loss": 1.0})
        free[0] = 1000  # somebody tidied up
        log.step(State(5), {"loss": 1.0})
    assert capsys.readouterr().out.count("cannot be written") == 1
    monkeypatch.undo()
    life(options(tmp_path), 5, 6)
    assert steps(tmp_path) == [1, 5, 6]


# ---- the console ----------------------------------------------------------------------------------
def test_a_line_says_epoch_step_eta_lr_loss_acc_and_samples_per_second(tmp_path, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("common.ledger.log.time.monotonic", lambda: now[0])
    with log_for(options(tmp_path), state_step=100, total_steps=564) as log:
        log.start(["net, 21,840 parameters"])
        now[0] += 1
        log.step(State(120, 0, 7680), {"loss": 0.48123, "acc": 0.8611, "lr": 1e-3})
        now[0] += 2
        log.step(State(130, 0, 8320), {"acc": 1.0, "grad_norm": 2.34567, "MiB_0": 12345})
        now[0] += 60
        log.evaluation(State(188, 0, 12000), {"val_acc": 0.9712, "val_loss": 0.09})
        now[0] += 1
        log.step(State(189, 1, 64), {"loss": 1.0})  # the minute of evaluation does not slow this step
    assert capsys.readouterr().out.splitlines() == [
        "net, 21,840 parameters",
        "epoch 1/3  step 120/564  eta 0:00:22  lr 1.00e-03  loss 0.4812  acc 0.861  1,280 samples/s",
        "epoch 1/3  step 130/564  eta 0:00:43  acc 1.000  grad_norm 2.346  MiB_0 12,345  320 samples/s",
        "step 188  val_acc 0.9712  val_loss 0.0900",
        "epoch 2/3  step 189/564  eta 0:04:30  loss 1.0000  64 samples/s"]


def test_other_ranks_say_and_write_nothing(tmp_path, capsys):
    run_dir = tmp_path / "run"
    with log_for(options(run_dir, tensorboard=True, progress="on"), rank=1, state_step=3,
                 records=[{"step": 3}]) as log:
        log.start(["a"])
        log.step(State(4), {"loss": 1.0})
        log.evaluation(State(4), {"val_acc": 1.0})
        log.note("b")
    log.close()
    assert capsys.readouterr() == ("", "") and not run_dir.exists()


PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace as N
from common.ledger import Log
from common.options import Options
opts = Options(run_dir=Path(sys.argv[1]), progress=sys.argv[2], tensorboard=False)
with Log(opts, N(rank=0), total_steps=2000) as log:
    for step in range(1, 2001):
        log.step(N(step=step, epoch=0, position=step), {"loss": 1.0})
        if step == 1500:
            log.note("half way and more")
    print("the end")
"""


def command(*argv, program=PROGRAM):
    return [sys.executable, "-c", program, *map(str, argv)]


@pytest.fixture
def run(tmp_path):
    def run(name, progress, program=PROGRAM, **kwargs):
        return subprocess.run(command(tmp_path / name, progress, program=program), cwd=ROOT, timeout=60,
                              stderr=subprocess.PIPE, **kwargs)
    return run


def test_stdout_that_goes_away_or_fills_up_does_not_stop_the_run(tmp_path, run):
    head = subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    done = run("a", "auto", stdout=head.stdin)
    head.stdin.close()
    assert head.stdout.read().startswith("epoch 1/3  step 1/2000") and head.wait() == 0
    head.stdout.close()
    assert (done.returncode, done.stderr) == (0, b"") and len(steps(tmp_path / "a")) == 2000
    for name, progress in (("b", "auto"), ("c", "on")):
        with open("/dev/full", "w") as full:
            done = run(name, progress, stdout=full)
        assert (done.returncode, done.stderr) == (0, b"") and len(steps(tmp_path / name)) == 2000


def test_a_process_begun_without_stdout_logs_to_its_file(tmp_path, run):
    program = PROGRAM.replace('print("the end")', "assert sys.stdout is None")
    done = run("a", "auto", program, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, b"") and len(steps(tmp_path / "a")) == 2000


def on_a_terminal(tmp_path, columns, rows=24):
    """What the program shows on a terminal that says it has so many columns and rows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    xterm = {**os.environ, "TERM": "xterm"}
    program = subprocess.Popen(command(tmp_path / "a", "auto"), cwd=ROOT, stdout=theirs, env=xterm)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # EIO: the other end is closed
        pass
    os.close(ours)
    assert program.wait(60) == 0
    return shown.decode().replace("\x1b[K", "")


@pytest.mark.parametrize(("columns", "rows"), [(0, 24), (80, 0), (0, 0)])
def test_a_terminal_that_reports_a_width_or_height_of_0_shows_the_bar_as_one_of_80(tmp_path, columns, rows):
    last = on_a_terminal(tmp_path, columns, rows).split("\r")[-2]
    assert last.startswith("100%|██████████| epoch 1/3  step 2000/2000") and len(last.rstrip()) <= 80


def test_a_terminal_shows_a_bar_with_notes_above_it_and_a_file_shows_lines(tmp_path, run):
    shown = on_a_terminal(tmp_path, 120)
    last = shown.split("\r")[-2]
    assert last.startswith("100%|██████████| epoch 1/3  step 2000/2000  eta 0:00:00") and "samples/s" in last
    assert "\rhalf way and more\r\n" in shown
    plain = run("b", "auto", stdout=subprocess.PIPE, text=True).stdout
    assert plain.count("\n") == 2002 and "|" not in plain and "\r" not in plain


def test_a_bar_that_is_not_full_goes_away_and_shows_world_lives_and_lost_steps(tmp_path, monkeypatch, capsys):
    with log_for(options(tmp_path, progress="on"), total_steps=9) as log:
        log.start([], world=2, lives=3, lost=4)
        log.step(State(1, 0, 64), {"loss": 1.0, "lr": 0.1})
        shown = capsys.readouterr().out
    assert shown.startswith("\r\x1b[K 11%|█         | epoch 1/3  step 1/9  eta ") and "lr" not in shown
    assert shown.endswith("samples/s  world 2  lives 3  lost 4")
    assert screen(shown + capsys.readouterr().out) == [""]


def test_the_bar_of_a_run_is_full_at_its_end_also_if_its_last_step_was_not_logged(tmp_path, capsys):
    with log_for(options(tmp_path, progress="on"), total_steps=9) as log:
        log.step(State(8), {"loss": 1.0})
        log.evaluation(State(9), {"val_loss": 0.5})
    *_, bar, end = screen(capsys.readouterr().out)
    assert bar.startswith("100%|██████████| epoch 1/3  step 9/9  eta 0:00:00  loss 1.0000") and end == ""


def screen(text):
    """The lines that a terminal shows after it was sent this text."""
    lines, column = [[]], 0
    for part in re.findall(r"\x1b\[K|.", text, re.DOTALL):
        if part == "\n":
            lines.append([])
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            del lines[-1][column:]
        else:
            lines[-1][column:column + 1] = part
            column += 1
    return ["".join(line).rstrip() for line in lines]


def test_a_text_the_terminal_cannot_spell_is_escaped_not_lost(run):
    program = PROGRAM.replace('"half way and more"', r'"caf\xe9 \udcff"')
    done = run("a", "off", program, stdout=subprocess.PIPE,
               env={**os.environ, "PYTHONIOENCODING": "ascii:strict"})
    assert done.returncode == 0 and b"caf\\xe9 \\udcff\n" in done.stdout and b"step 2000/2000" in done.stdout


# ---- TensorBoard ----------------------------------------------------------------------------------
def curve(run_dir, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(run_dir / "tb"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_curves_do_not_overlap_after_restarts_and_files_are_private(tmp_path):
    pytest.importorskip("tensorboard")
    opts = options(tmp_path, tensorboard=True)
    life(opts, 0, 5)
    life(opts, 3, 4)
    with log_for(opts, state_step=4) as log:
        log.step(State(5), {"loss": 50.0})
        log.evaluation(State(5), {"val_acc": 0.5, "val_loss": 0.7})
    assert curve(tmp_path, "train/loss") == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50)]
    assert curve(tmp_path, "val/acc") == [(5, 0.5)] and len(curve(tmp_path, "train/lr")) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "tb").iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "tb").stat().st_mode) == 0o700


def test_a_run_with_nothing_to_add_neither_imports_tensorboard_nor_leaves_a_file(tmp_path):
    opts = options(tmp_path, tensorboard=True)
    threads = threading.active_count()
    life(opts, 9, 9)
    assert not (tmp_path / "tb").exists() and threading.active_count() == threads


def test_a_missing_tensorboard_costs_one_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    life(replace(options(tmp_path), tensorboard=True), 0, 5)
    assert capsys.readouterr().out.count("tensorboard is not installed") == 1 and len(steps(tmp_path)) == 5


def test_curves_that_cannot_be_written_cost_one_note(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "tb").touch()  # a file where the folder should be
    life(options(tmp_path, tensorboard=True), 0, 5)
    assert (capsys.readouterr().out.count("training continues without curves") == 1
            and len(steps(tmp_path)) == 5)
