"""What lives before it mean for the one that begins."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from refusals import refusal

from common.extras.no_progress import KILLED_LIVES, refuse_without_progress
from common.options import Options
from common.options.parser import refuse_a_crash_loop


def begin(lives, step=7, position=0, finished=False, evaluation_due=False):
    """Begin a life at `step` after these: (step, events)."""
    past = []
    for began, *names in reversed(lives):
        events = [{"event": name, "why": "mine"} for name in names]
        past.append([{"event": "life", "step": began}, *events])
    progress = SimpleNamespace(
        samples=9,
        order=[9, 0],
        epoch=0,
        step=step,
        position=position,
        finished=finished,
        evaluation_due=evaluation_due,
    )
    refuse_without_progress(past, SimpleNamespace(opts=Options(), progress=progress))


TRAINED = (
    7,
    "first_step",
    "save",
    "error",
)  # what it saved was withdrawn: the next one begins where it began
KILLED = (7, "first_step")


@pytest.mark.parametrize(
    "lives, ends",
    [
        ([(7,)] * 3, True),
        ([(7,)] * 2, False),
        ([TRAINED] * 3, True),
        ([TRAINED] * 2, False),
        ([(7, "error", "stop")] * 3, True),
        ([(7,), (5,), (7,), (7,)], False),
        ([(7,), (7, "stop"), (7,), (7,)], False),
        ([KILLED] * (KILLED_LIVES - 1), False),
        ([KILLED] * KILLED_LIVES, True),
        ([(7,), (7,), (7,), (7, "refused")], False),
        ([(7,), (7,), (7,), (7, "error", "refused")], False),
    ],
)
def test_a_run_ends_with_5_when_lives_in_a_row_begin_on_one_step_and_fail_there(lives, ends):
    with refusal("no progress in .* lives on step 8", code=5) if ends else nullcontext():
        begin(lives)


def test_a_life_that_begins_elsewhere_is_not_refused_and_one_that_evaluates_has_no_samples():
    begin([(7,)] * 3, step=8)
    begin([(7,)] * 3, finished=True)
    for due in ({"position": 9}, {"finished": True, "evaluation_due": True}):
        with refusal("none, it is an evaluation", code=5):
            begin([(7,)] * 3, **due)


@pytest.mark.parametrize(
    "opened, restart, cleaned, ends",
    [
        (None, 3, 0, True),
        (1, 5, 0, True),
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
