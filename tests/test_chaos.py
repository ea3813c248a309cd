"""The short form of the fault campaign; the long one is a command, see tests/chaos/."""
import random

from tests.chaos import points_names
from tests.chaos.__main__ import assert_that_it_struck
from tests.chaos.director import Campaign


def test_twenty_faults_of_every_kind_cost_no_sample_and_no_step_of_a_survivor(jobs):
    campaign = Campaign(jobs, random.Random(1), count=20, short=True)
    campaign.go()                                                   # every check raises
    assert_that_it_struck(campaign)
    assert sum(survived for _, survived, _ in campaign.lost) >= 5
    assert any(name.removeprefix("at ") in points_names()["save"] for name in campaign.tally)
