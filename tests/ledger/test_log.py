"""The log: each step once after any crashes, and no stream and no disk that stops a training."""

import errno
import os
import stat
import subprocess
import sys
import time
from contextlib import closing

import pytest
from jobs import ROOT, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.ledger import Log
from common.options import Options


def options(run_dir, tensorboard=False):
    return Options(run_dir=run_dir, tensorboard=tensorboard, progress="off")


def life(opts, first, last, **kwargs):
    """Steps first+1..last of a run, as one process logs them; loss = step, so that a misplaced line shows."""
    with closing(Log(opts, 0, first, 100, **kwargs)) as log:
        for step in range(first + 1, last + 1):
            log.step({"step": step, "epoch": 0, "loss": float(step), "lr": 1e-3})


def steps(run_dir):
    return [row["step"] for row in rows(run_dir)]


# ---- metrics.jsonl --------------------------------------------------------------------------------
ODD = (
    '{"step": 7, "epoch": 1, "loss": 7.0}',
    '{"step": 2, "epoch": 1, "loss": 0}',
    "not JSON",
    "[1]",
    '["step"]',
    '{"loss": 1}',
    '{"step": "x"}',
    '{"step": null}',
    '{"step": [1], "epoch": 1}',
    '{"event":' * 100_000,
)


def test_each_step_is_there_once_after_crashes_that_tear_lines_and_resume_earlier(tmp_path):
    opts = options(tmp_path)
    path = tmp_path / "metrics.jsonl"
    life(opts, 0, 5)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    life(opts, 3, 7)  # steps 4 and 5 were never saved
    with path.open("a") as file:
        file.write("\n".join(ODD) + "\n")
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


def test_a_start_reads_and_changes_the_end_of_a_long_file_alone(tmp_path):
    opts = options(tmp_path)
    path = tmp_path / "metrics.jsonl"
    head = b'not JSON, and nobody looks here\n{"step": 1, "val_acc": 0.5}\n'
    text = head + b"".join(b'{"step": %d, "epoch": 1}\n' % step for step in range(2, 9000))
    path.write_bytes(text)
    inode = path.stat().st_ino
    life(opts, 8990, 8990, records=[{"step": 8990, "epoch": 0}, {"step": 1, "val_acc": 0.5}])
    assert path.read_bytes() == text[: text.index(b'{"step": 8991')] and path.stat().st_ino == inode
    life(opts, 500, 500)  # it was another disk's checkpoint
    assert path.read_bytes() == text[: text.index(b'{"step": 501')]


def test_a_step_has_one_training_row_and_one_evaluation_row_with_time_and_epochs_from_1(tmp_path):
    opts = options(tmp_path)
    life(opts, 0, 4)
    for _ in range(2):  # the second life evaluates step 4 once more
        with closing(Log(opts, 0, 4, 100)) as log:
            log.evaluation({"step": 4, "val_acc": 0.97, "val_loss": float("nan")}, {})
    assert steps(tmp_path) == [1, 2, 3, 4, 4]
    *training, last = rows(tmp_path)
    assert {row["epoch"] for row in training} == {1}
    assert abs(last.pop("time") - time.time()) < 60
    assert last == {"step": 4, "val_acc": 0.97, "val_loss": None}, "JSON has no nan"
    life(opts, 3, 3)
    assert steps(tmp_path) == [1, 2, 3]  # evaluations of a lost step go with it


def test_a_full_disk_costs_lines_and_one_warning_and_a_torn_line_does_not_swallow_the_next(
    tmp_path, monkeypatch, capsys
):
    write = os.write
    free = [0]

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
    assert steps(tmp_path) == [1, 5]


# ---- the console ----------------------------------------------------------------------------------
def test_a_line_says_epoch_step_eta_numbers_and_samples_per_second_and_the_last_one_the_result(
    tmp_path, capsys, now
):
    with closing(Log(options(tmp_path), 0, 100, 564)) as log:
        log.start(["net, 21,840 parameters"])
        now.seconds += 1
        log.step({"step": 120, "epoch": 0, "loss": 0.48123, "acc": 0.8611, "lr": 1e-3})
        now.seconds += 60
        metrics = {"val_acc": 0.9712, "val_loss": 0.09}
        log.evaluation({"step": 188} | metrics, metrics | {"labels": [1, 2]})
        now.seconds += 1
        log.step({"step": 189, "epoch": 1, "f1": 1.23456})  # a minute of evaluation left out
        log.done(564, {"val_acc": 0.9712, "step": 188})
    assert capsys.readouterr().out.splitlines() == [
        "net, 21,840 parameters",
        "epoch 1/3  step 120/564  eta 0:00:22  loss 0.4812  acc 0.861  lr 1.00e-03  1,280 samples/s",
        "step 188  val_acc 0.9712  val_loss 0.0900  labels [1 2]",
        "epoch 2/3  step 189/564  eta 0:04:21  f1 1.235  64 samples/s",
        f"done at step 564: val_acc 0.9712 (best, step 188), {tmp_path}",
    ]


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
    "redirection, progress, shown",
    [
        ("| true", "auto", ""),
        ("> /dev/full", "on", ""),
        (">&-", "auto", ""),
        ("", "auto", "caf\\xe9 \\udcff\n"),
    ],
    ids=["pipe", "full", "none", "ascii"],
)
def test_no_stdout_stops_a_run_with_progress_or_without(tmp_path, redirection, progress, shown):
    """A reader has left, a disk is full, there never was one, it cannot spell."""
    command = f'set -o pipefail; "$@" {redirection}'
    words = ["bash", "-c", command, "bash", sys.executable, "-c", PROGRAM, tmp_path, progress]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(words, cwd=ROOT, env=ascii_only, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and len(steps(tmp_path)) == 2000
    assert done.stdout.endswith(shown) and done.stdout.count("\n") == 2001 * bool(shown)


# ---- TensorBoard ----------------------------------------------------------------------------------
def test_tensorboard_curves_do_not_overlap_after_restarts(tmp_path):
    opts = options(tmp_path, tensorboard=True)
    life(opts, 9, 9)
    assert not (tmp_path / "tb").exists()  # nothing to add
    life(opts, 0, 5)
    life(opts, 3, 4)
    with closing(Log(opts, 0, 4, 100)) as log:
        log.step({"step": 5, "epoch": 0, "loss": 50.0})
        log.evaluation({"step": 5, "val_acc": 0.5}, {})
    board = EventAccumulator(f"{tmp_path}/tb").Reload()
    loss = [(point.step, point.value) for point in board.Scalars("train/loss")]
    assert loss == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50)]
    assert len(board.Scalars("train/samples_per_s")) == 5 and len(board.Scalars("val/acc")) == 1
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "tb").iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "tb").stat().st_mode) == 0o700


def test_tensorboard_curves_that_cannot_be_written_cost_one_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    life(options(tmp_path, tensorboard=True), 0, 5)
    assert capsys.readouterr().err.count("no curves for TensorBoard") == 1 and len(steps(tmp_path)) == 5
