"""The forked worlds that other tests stand on fail where a rank of theirs does."""

import signal

import pytest
import torch
from ranks import fork_ranks


def test_the_first_rank_to_fail_is_reported_first_with_its_traceback():
    def fail_at_one(world):
        if world.rank == 1:
            raise ValueError("the reason")
        return world.all_sum(torch.ones(1)).item()

    with pytest.raises(AssertionError, match="^rank 1, exit code 1: Traceback(.|\n)*ValueError: the reason"):
        fork_ranks(2, fail_at_one, deadline=600)


def test_a_rank_that_hangs_is_killed_at_the_deadline():
    def hang(world):
        while world.rank == 1:
            signal.pause()

    with pytest.raises(AssertionError, match="rank 1: no answer in time, killed"):
        fork_ranks(2, hang, deadline=3)
