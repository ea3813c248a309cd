"""--cross-check: a rank whose device computes wrong numbers is found by the votes of all, and named."""

import socket
from types import SimpleNamespace

import pytest
import torch
from jobs import steps_on_disk
from ranks import fork_ranks
from test_bitwise import CNN, life, options, run

import train_ddp
from common.extras.votes import VotedGradient, voted_slice

HOST = socket.gethostname()
EVERY = {"cross_check": 2, "epochs": 3, "save_every": 1, "keep": 20}


def broken(world, opts, rank, first, last, again):
    """A life in which one rank's products of matrices have a wrong bit from step `first` to step `last`.

    With `again` also when it computes a slice once more.
    """
    linear = torch.nn.functional.linear
    wrong = []
    pieces = VotedGradient.pieces

    def of_one_more(self):
        for samples in pieces(self):
            again_now = bool(self.votes)  # the slice that is computed once more
            at_fault = first <= self.state.progress.step + 1 <= last
            wrong[:] = [True] * (at_fault and (again or not again_now))
            yield samples
            wrong.clear()

    def flipped(*args):
        out = linear(*args)
        if wrong:
            out.detach().view(torch.int32).flatten()[0] ^= 1 << 20
        return out

    if world.rank == rank:
        VotedGradient.pieces = of_one_more
        torch.nn.functional.linear = flipped
    return life(world, train_ddp, opts)


@pytest.mark.parametrize(
    "ranks, rank, first, last, again, named",
    [
        (3, 1, 5, 99, True, "rank 1"),  # a device that is always wrong: a third decides
        (3, 2, 6, 6, False, "rank 2"),  # wrong once, in the slice that is compared
        (2, 0, 6, 6, False, "rank 0"),  # of two, the one that computes something else the second time
        (2, 1, 5, 99, True, f"rank 0 (host {HOST}) or rank 1"),  # of two that stay different nobody can tell
    ],
)
def test_a_device_that_computes_wrong_numbers_is_named_and_the_run_goes_back(
    tmp_path, capfd, ranks, rank, first, last, again, named
):
    opts = options(tmp_path / "run", CNN | EVERY)
    codes = fork_ranks(ranks, broken, opts, rank, first, last, again, may_die=range(ranks))
    assert codes == [7] * ranks
    assert f"{named} (host {HOST}) computes slice" in capfd.readouterr().err
    steps = steps_on_disk(tmp_path / "run")
    assert steps and steps[-1] <= 5, "nothing that was saved after the last comparison stays"
    if again:
        return
    ended = run(tmp_path / "run", ranks, CNN | EVERY)  # on sound devices
    assert ended == run(tmp_path / "whole", 1, CNN | {"epochs": 3})


SIGNED = """
import torch
from torch import nn


class Signed(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x - 0 * self.unused.sum()  # its gradient is -0.0 or 0.0


def signed(data):
    return nn.Sequential(nn.Flatten(), nn.Linear(144, data.classes), Signed())
"""


def test_a_gradient_of_minus_zero_names_no_rank(tmp_path):
    (tmp_path / "signed.py").write_text(SIGNED)
    given = EVERY | {"model": f"{tmp_path}/signed.py:signed", "cross_check": 1}
    assert run(tmp_path / "run", 3, CNN | given)


def test_the_slices_that_are_compared_are_all_in_turn():
    opts = SimpleNamespace(seed=3, virtual_ranks=7)
    assert {voted_slice(opts, step) for step in range(9, 2000, 10)} == {*range(7)}
