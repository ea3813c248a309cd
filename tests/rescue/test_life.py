"""What lives before it mean for the one that begins."""

import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from refusals import refusal

from common.errors import UserError
from common.ledger import Ledger, newest_lives
from common.options import Options
from common.rescue import refuse_a_crash_loop
from common.rescue.life import KILLED_LIVES, refuse_without_progress


def refused(run, *lives, step=7, **of_the_state):
    """(code, text) of the error of a life that begins at `step` after these: (step, events)."""
    ledger = Ledger(run)
    ledger.lines.path.unlink(missing_ok=True)
    for number, (began, *names) in enumerate(lives):
        ledger.event("life", life=str(number), world=1, step=began)
        for name in names:
            ledger.event(name, step=began + 9, rank=0, why="mine")
    try:
        plain = {"position": 0, "finished": False, "evaluation_due": False}
        progress = SimpleNamespace(samples=9, order=[9, 0], step=step, epoch=0, **plain | of_the_state)
        state = SimpleNamespace(opts=Options(run_dir=run), progress=progress)
        refuse_without_progress(newest_lives(run), state)
    except UserError as error:
        ledger.lines.close()
        return error.code, str(error)
    ledger.lines.close()


def test_a_run_ends_with_5_when_lives_in_a_row_begin_on_one_step_and_fail_there(tmp_path):
    trained = "first_step", "save", "error"  # what it saved was withdrawn: the next one begins where it began
    killed = ("first_step",)
    for lives, code in [
        ([(7,)] * 3, 5),
        ([(7,)] * 2, None),
        ([(7, *trained)] * 3, 5),
        ([(7, *trained)] * 2, None),
        ([(7, "error", "stop")] * 3, 5),
        ([(7,), (5,), (7,), (7,)], None),
        ([(7,), (7, "stop"), (7,), (7,)], None),
        ([(7, *killed)] * 3, None),
        ([(7, *killed)] * KILLED_LIVES, 5),
        ([(7,), (7,), (7,), (7, "refused")], None),
    ]:
        assert (refused(tmp_path, *lives) or (None,))[0] == code, lives
    said = "no progress in 3 lives on step 8; the first error: mine"
    assert said in refused(tmp_path, *[(7, *trained)] * 3)[1]
    assert refused(tmp_path, *[(7,)] * 3, step=8) is None
    for due in ({"position": 9}, {"finished": True, "evaluation_due": True}):
        assert "none, it is an evaluation" in refused(tmp_path, *[(7,)] * 3, **due)[1]
    assert refused(tmp_path, *[(7,)] * 3, finished=True) is None


@pytest.mark.parametrize(
    "opened, restart, cleaned, ends",
    [
        (None, 2, 0, False),
        (None, 3, 0, True),
        (1, 4, 0, False),
        (1, 5, 0, True),
        (4, 5, 0, False),
        (9, 11, 0, False),
        (None, 5, 2, True),
        (None, 5, 3, False),
    ],
)
def test_lives_that_end_before_they_train_end_the_job_with_5_too(
    tmp_path, monkeypatch, opened, restart, cleaned, ends
):
    """A step is not needed: what fails is the net, the data or the load.

    A cleaner of /tmp has taken what lives before `cleaned` had there.
    """
    for life in {*range(cleaned, restart)} - {opened}:
        (tmp_path / f"start-{life}-0").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path}/attempt_{restart}/0/error.json")
    with refusal("before they could train", code=5) if ends else nullcontext():
        refuse_a_crash_loop()


def test_a_start_that_finds_no_checkpoint_where_one_was_saved_tells_so(jobs, run):
    """Its disk may not be mounted: training would begin again without a word."""
    for steps, told in ((4, False), (4, True)):
        said = jobs.python(
            "train_ddp.py",
            f"--run-dir={run}",
            "--model=mlp",
            "--dataset=random",
            "--no-tensorboard",
            f"--max-steps={steps}",
        ).ends_with(0)
        assert told == ("step 4 was saved, training goes on at step 0: is a disk missing" in said), said
        shutil.rmtree(run / "checkpoints")
