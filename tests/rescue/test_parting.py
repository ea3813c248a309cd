"""A rank that is faster than another is not taken for one that has left the loop."""

from types import SimpleNamespace

from refusals import refusal

from common.rescue.parting import Parting


class Rank:
    """Its parting, at step 5; `told` is what it has sent."""

    def __init__(self, rank):
        self.told = []
        store = SimpleNamespace(set=lambda *_: None, check=lambda names: True)  # all others have met
        world = SimpleNamespace(rank=rank, size=3, store=store)
        state = SimpleNamespace(progress=SimpleNamespace(step=5))
        self.parting = Parting(state, world, self.told.append)


def test_one_that_leaves_the_next_epoch_while_another_still_ends_this_one_is_no_alarm():
    fast, slow = Rank(2), Rank(0)
    for rank in (fast, slow):
        rank.parting.go_on()  # the end of the epoch after step 5
    fast.parting.passed()
    fast.parting.meet()
    assert slow.parting.hear(fast.told[0])
    slow.parting.passed()
    slow.parting.meet()
    slow.parting.go_on()


def test_one_that_leaves_again_before_another_has_seen_them_meet_is_heard():
    fast, slow = Rank(2), Rank(0)
    fast.parting.meet()
    fast.parting.meet()
    for message in fast.told:
        slow.parting.hear(message)
    slow.parting.meet()
    with refusal("rank 2 has left the loop at step 5, rank 0 goes on"):
        slow.parting.go_on()
