"""Data that a person has mended: training goes on where no sample's place has moved, else its epoch begins
again, and says so.
"""

import pytest
from jobs import CLEAN
from stores import a_life, at_step, is_at, options, refused, save, two_checkpoints
from test_audit import BATCH, N, live

from common.extras.audit import audit

OTHER = "0" * 64


def changed(tmp_path, samples=None, accepts=False, resume="auto", **flags):
    """A life of the run that finds other data than the one before."""
    opts = options(tmp_path, accept_data_change=accepts, resume=resume, **flags)
    return a_life(opts, fingerprint=OTHER, samples=samples)


def test_changed_data_is_refused_with_its_way_out_and_has_to_be_accepted_once(tmp_path):
    two_checkpoints(tmp_path)
    words = "the data's fingerprint was ffffffffffff, now 000000000000"
    text = refused(options(tmp_path), words, fingerprint=OTHER)
    assert "--accept-data-change" in text and f"--run-dir NEW --resume {tmp_path}/run" in text
    opts = options(tmp_path, lr=0.5, accept_data_change=True)
    assert "give the same options" in refused(opts, "--lr was", fingerprint=OTHER)
    with changed(tmp_path, accepts=True) as life:
        assert is_at(life.state, 2) and [words in text for text in life.said] == [True]
    with changed(tmp_path) as life:  # nothing was saved in between
        save(life, 3)
    assert not life.said
    refused(options(tmp_path), "fingerprint was 000000000000, now ffffffffffff")
    with changed(tmp_path) as life:
        assert is_at(life.state, 3)


@pytest.mark.parametrize("samples", [641, 639, 5])
def test_with_another_number_of_samples_the_epoch_begins_again_and_this_is_said(tmp_path, samples):
    two_checkpoints(tmp_path)
    with changed(tmp_path, samples, accepts=True) as life:
        progress = life.state.progress
        assert (progress.step, progress.epoch, progress.position) == (2, 0, 0)
    begins = life.said[1:]
    assert begins[0].startswith("step 2 was saved at position 2 ") and f"with {samples} samples" in begins[0]
    with changed(tmp_path, samples) as life:
        assert life.said == begins, "the checkpoint is the same"
        life.state.progress.position = 4
        life.store.save()
    with changed(tmp_path, samples) as life:
        assert life.state.progress.position == 4 and not life.said


def test_an_epoch_that_is_complete_stays_complete_whatever_the_data_becomes(tmp_path):
    with a_life(options(tmp_path)) as life:
        at_step(life.state, 2).progress.position = 640
        life.store.save()
    with changed(tmp_path, 700, accepts=True) as life:
        assert life.state.progress.epoch_over and life.state.progress.position == 700


@pytest.mark.parametrize(
    "flags, samples, position", [({"lr": 0.5}, 640, 2), ({"seed": 1}, 640, 0), ({}, 641, 0)]
)
def test_resuming_another_run_never_goes_on_in_the_middle_of_another_order(
    tmp_path, flags, samples, position
):
    _, root = two_checkpoints(tmp_path / "old")
    with changed(tmp_path, samples, resume=f"{root}/step-00000002", **flags) as life:
        assert (life.state.progress.step, life.state.progress.position) == (2, position)
    assert ["begins again" in text for text in life.said] == [True] * (not position)


def test_the_audit_knows_where_an_epoch_began_again_and_finds_what_did_not(tmp_path):
    live(tmp_path, "aa", 1, 0, 9)  # 7 steps an epoch
    live(tmp_path, "bb", 1, 9, 9, n=N - 1, at=(1, 0))  # came to nothing
    live(tmp_path, "cc", 1, 9, 18, n=N - 1, at=(1, 0))
    assert audit(tmp_path) == CLEAN
    # as if the place in one order were one in another
    live(tmp_path, "dd", 1, 18, 24, n=N - 20, at=(2, 2 * BATCH))
    assert audit(tmp_path)["missed"] and audit(tmp_path)["repeated"]


def test_the_audit_of_a_run_that_took_over_another_ones_steps_counts_from_where_it_began(tmp_path):
    live(tmp_path, "aa", 1, 9, 20, at=(1, 0))  # with a step more than these samples take
    assert audit(tmp_path) == CLEAN
