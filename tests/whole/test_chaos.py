"""The short form of the fault campaign, and proof that it can fail; the long form is a command, see
tests/chaos/.
"""

import random

import pytest
from jobs import CLEAN, PACED, STEPS, audit, events, lives

from tests.chaos import machines, store
from tests.chaos.__main__ import assert_that_it_struck, table
from tests.chaos.director import UNLOADED, Campaign
from tests.chaos.events import SHORT, Event


def test_faults_of_every_kind_cost_no_sample_and_no_step_of_a_survivor(jobs):
    campaign = Campaign(jobs, random.Random(49812), count=len(SHORT), short=True, epochs=12)
    campaign.go()  # every check raises
    assert_that_it_struck(campaign)
    assert sum(change.survived for change in campaign.changes) >= 5
    assert campaign.tally["loader KILL"]
    said = table(campaign, "c1deb99", "python -m tests.chaos")
    assert " lost 0, missed 0, repeated 0, " in said and "that a survivor had finished | 0 |" in said


def test_machines_that_die_in_bunches_cost_no_sample(jobs):
    campaign = Campaign(jobs, random.Random(16), count=2, epochs=12, only=["bunch"])
    campaign.go()
    assert campaign.notes[0].items() >= CLEAN.items() and campaign.notes[0]["lives"] > 1
    assert campaign.tally["cluster launcher"] == 1


def test_a_training_struck_at_any_call_that_changes_a_file_ends_right(jobs, tmp_path):
    bench = store.Bench(jobs, tmp_path)
    assert bench.calls > 300
    for strike in store.strikes(bench, random.Random(3))[::1000]:
        bench.strike(strike)


@pytest.mark.skipif(bool(machines.why_not()), reason=machines.why_not() or "-")
@pytest.mark.parametrize(
    "fault", ["cable cut", "power", "store stopped, then SIGTERM", "store killed, then SIGTERM in the save"]
)
def test_a_machine_that_falls_silent_or_is_wrong_costs_seconds_and_no_step(jobs, tmp_path, fault):
    machines.strike(jobs, tmp_path / "box", fault, count=2)


KILLED = Event("worker", "KILL", steps=3)
BUGS = {  # what strikes, and what is found
    "no_rescue": (KILLED, "a survivor's step is lost"),
    "position_ahead": (KILLED, "'missed': [1-9]"),
    "optimizer_forgotten": (KILLED, "weights differ"),
    "orphans": (Event("agent", "KILL", steps=3), "the workers of dead agents to end"),
    "loaders_hold_up_their_rank": (
        Event("loader", "KILL", steps=3),
        "the rank of a dead loading process to leave",
    ),
    "named_too_early": (
        Event("point", "KILL", "write:optimizer.safetensors", 9),
        "damaged|a survivor's step is lost",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_campaign_finds_a_mistake(jobs, monkeypatch, bug):
    event, words = BUGS[bug]
    monkeypatch.setattr("tests.chaos.strikes.MISSED", 3)
    campaign = Campaign(jobs, random.Random(1), count=0, epochs=2, CHAOS_BUG=bug)
    campaign.todo = [event, event]
    campaign.kinds = ["plain"] * 9
    campaign.size = 2
    if event.target != "loader":
        campaign.flavours = UNLOADED
    if bug == "orphans":
        campaign.patience = 5
    if bug == "named_too_early":
        campaign.size = 1  # a survivor would write the same step again
    if bug in ("orphans", "loaders_hold_up_their_rank"):
        campaign.pace = "0.5"  # they must not be done before anybody looks, nor have all shares of the epoch
    with pytest.raises(AssertionError, match=words):
        campaign.go()
    for pid in jobs.alive():
        jobs.kill(pid)


@pytest.mark.parametrize(
    "point, rescued, begun", [("close.0", 1, [0, STEPS]), ("closed.0", 0, [0, STEPS]), ("leave.1", 0, [0])]
)
def test_a_death_in_the_last_moments_leaves_the_last_step_on_the_disk(
    jobs, tmp_path, run, point, rescued, begun
):
    """close.0: the process that saves dies with the last save hardly begun; one of the others saves, unless
    the thread of that save was faster than the kill.
    leave.1: the run is done, so that the next start has nothing to do.
    """
    (tmp_path / "armed").mkdir()
    (tmp_path / "armed" / point).write_text("KILL")
    worker = ("tests/chaos/worker.py", *PACED, f"--run-dir={run}")
    places = {"CHAOS_ARMED": f"{tmp_path}/armed", "CHAOS_JOURNAL": f"{tmp_path}/journal"}
    jobs.torchrun(3, *worker, PACE="0", **places).ends_with(0)
    assert [life["step"] for life in lives(run)] == begun
    assert (run / f"checkpoints/step-{STEPS:08d}/manifest.json").exists()
    rescues = [event["step"] for event in events(run, "rescue")]
    assert rescues == [STEPS] * rescued or point == "close.0" and not rescues
    assert audit(run) == CLEAN
