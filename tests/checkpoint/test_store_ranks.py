"""Node-local folders or a shared one: the newest checkpoint that anybody has, on every rank; replicas that
differ end the life.
"""

import errno
import itertools
import os
import re
from unittest.mock import Mock

import pytest
import torch
from ranks import at_home, fork_ranks
from refusals import refusal
from stores import (
    a_life,
    announced_rescue,
    at_step,
    end,
    is_at,
    new_store,
    options,
    refused,
    resumes_at,
    save,
    started,
    steps_of,
    tiny_state,
    two_checkpoints,
)

import common.elastic
import train_ddp
from common.extras import relay


def of_node(folder, world):
    return options(folder / f"node{world.rank // world.local_size}")


def test_the_newest_of_all_nodes_wins_is_sent_to_all_and_kept_by_all(tmp_path):
    two_checkpoints(tmp_path / "node0", steps=(3, 4))
    two_checkpoints(tmp_path / "node1", steps=(8, 9))  # node 2 is new

    def begin(world):
        with a_life(of_node(tmp_path, world), world=world) as life:
            return life.source, is_at(life.state, 9), life.store.owns

    assert fork_ranks(6, begin, node_size=2) == [
        ("checkpoints/step-00000009", True, leads) for leads in (True, False) * 3
    ]
    for node in range(3):  # whoever survives has it
        assert steps_of(options(tmp_path / f"node{node}"))[0] == 9


def test_damage_on_one_node_is_made_good_by_another_and_damage_on_all_is_refused_by_all(tmp_path):
    for node, steps in ((0, (3, 9)), (1, (3, 4))):
        two_checkpoints(tmp_path / f"node{node}", steps=steps)
    damage(tmp_path, "node0/run/checkpoints/step-00000009/model.safetensors")

    def begin(world):
        return resumes_at(of_node(tmp_path, world), 4, world=world)

    assert fork_ranks(2, begin, node_size=1) == [True, True]
    assert steps_of(options(tmp_path / "node0")) == [4, 3]  # received, kept, and the damaged one put aside
    damage(tmp_path, "*/run/checkpoints/step-*/model.safetensors")

    def refuse(world):
        refused(of_node(tmp_path, world), "none verifies", code=3, world=world)

    fork_ranks(2, refuse, node_size=1)


def damage(folder, files):
    for path in folder.glob(files):
        os.truncate(path, 7)


def test_of_two_checkpoints_with_one_name_and_other_content_the_second_is_tried_too(tmp_path):
    """Two nodes that trained apart: each has a step 9 of its own, and the first one is damaged."""
    for node in (0, 1):
        with a_life(options(tmp_path / f"node{node}")) as life:
            save(life, 3)
            life.state.progress.record = {"step": node}
            save(life, 9)
    damage(tmp_path, "node0/run/checkpoints/step-00000009/model.safetensors")

    def begin(world):
        with a_life(of_node(tmp_path, world), world=world) as life:
            told = sum("put aside" in text for text in life.said)
            return is_at(life.state, 9), life.state.progress.record, told

    assert fork_ranks(3, begin, node_size=1) == [(True, {"step": 1}, told) for told in (1, 0, 0)]
    assert [steps_of(options(tmp_path / f"node{node}")) for node in range(3)] == [[9, 3], [9, 3], [9]]


def test_ranks_of_a_machine_that_see_other_folders_hash_all_and_get_what_they_lack(tmp_path):
    two_checkpoints(tmp_path / "rank0")
    two_checkpoints(tmp_path / "rank1", steps=(1,))

    def begin(world):
        return resumes_at(options(tmp_path / f"rank{world.rank}"), 2, world=world)

    assert fork_ranks(2, begin) == [True, True]


@pytest.mark.parametrize(
    "flag, values, named",
    [
        ("max_steps", (200, 100), ["--max-steps"]),
        ("eval_every", (1, 2), ["--eval-every"]),
        ("task", ("/a/mine.py:loss", "/b/mine.py:loss"), []),
        ("data_dir", ("/a", "/b"), []),
    ],
)
def test_what_ranks_must_have_in_common_is_named_by_its_flag(tmp_path, flag, values, named):
    """Other --epochs gave other rates to ranks of one step: their weights drifted apart without a word."""
    one, other = (options(tmp_path, **{flag: value}).of_all_ranks() for value in values)
    assert [name for name in one if one[name] != other[name]] == named


def test_ranks_of_other_code_or_data_are_named_with_their_values(opts):
    def begin(world):
        if world.rank == 1:
            torch.__version__ = "1.0"
        refused(opts, code, world=world)
        torch.__version__ = version
        refused(opts, data, world=world, fingerprint="ab"[world.rank // 2] * 64)

    version = torch.__version__
    code = re.escape(f"different things: rank 0 has torch {version}, rank 1 has torch 1.0")
    data = "rank 0 has data aaaaaaaaaaaa, rank 2 has data bbbbbbbbbbbb"
    fork_ranks(3, begin)


def test_what_one_node_refuses_all_ranks_refuse_with_the_same_words(tmp_path):
    two_checkpoints(tmp_path / "node1", seed=3)

    def begin(world):
        return refused(of_node(tmp_path, world), "--seed was 3, now 0", world=world)

    first, second = fork_ranks(2, begin, node_size=1)
    assert first == second


def test_the_same_start_on_all_ranks_or_none(opts):
    def begin(world):
        state = tiny_state(opts)
        with torch.no_grad():
            state.net[0].weight[0, 0] += world.rank
        with refusal("the ranks have made different weights"):
            new_store(opts, world).restore(state)
        return state.invalid is None

    assert fork_ranks(2, begin) == [False, False]


@pytest.mark.parametrize("flip", ["the lowest bit of a weight", "a buffer"])
def test_replicas_that_differ_are_noticed_and_nothing_of_theirs_stays(tmp_path, flip):
    opts = options(tmp_path, keep=3)

    def diverge(world):
        store, state = started(opts, world)
        at_step(state, 1)
        store.compare_replicas()
        store.save()
        at_step(state, 2)
        if world.rank == 1:
            if flip == "a buffer":
                state.statistics.committed["1.num_batches_tracked"] += 1
            else:
                state.net[0].weight.data.view(torch.int32)[1, 2] ^= 1
        store.save()
        said = "step 2: the weights of the replicas differ .* step 1, where all agreed"
        with pytest.raises(RuntimeError, match=said):
            store.compare_replicas()
        store.save()
        rescued = announced_rescue(store)
        world.barrier()  # as in Rescue: the end takes the staging folder away
        end(store)
        return rescued

    assert fork_ranks(2, diverge) == ["", ""]
    assert steps_of(opts) == [1]


def test_a_flipped_weight_ends_a_real_training_before_it_is_saved(tmp_path):
    """--check-every: the life ends; the disk holds only what all agreed on."""
    flags = {"model": "mlp", "dataset": "random", "max_steps": 8, "check_every": 2, "tensorboard": False}
    opts = options(tmp_path, **flags)

    def train(world):
        at_home(world)
        real = common.elastic.TrainState.update

        def update(state, count):
            real(state, count)
            if state.progress.step == 5 and world.rank == 1:
                next(state.net.parameters()).data.view(torch.int32).view(-1)[0] ^= 1

        common.elastic.TrainState.update = update
        with pytest.raises(RuntimeError, match="step 6: the weights of the replicas differ"):
            train_ddp.main(opts)

    # the second to leave may hear of the first one's end before it raises the same error
    assert set(fork_ranks(2, train, may_die=range(2))) <= {None, 1}
    assert steps_of(opts)[0] == 4


def test_a_checkpoint_that_all_agreed_on_is_never_pruned(opts):
    with a_life(opts) as life:
        for step in range(1, 7):
            save(life, step)
            if step == 2:
                life.store.saver.agreed = 2
    assert steps_of(opts) == [6, 5, 2]


def test_a_checkpoint_that_its_only_machine_cannot_read_a_second_time_is_not_put_aside(tmp_path):
    """All took the one before, and the whole one, put aside, went with the next save."""
    opts, _ = two_checkpoints(tmp_path / "node0")

    def live(world):
        relay.read_file = Mock(side_effect=OSError(errno.EIO, "the disk is away"))
        refused(of_node(tmp_path, world), "cannot be read: the disk is away", code=1, world=world)

    fork_ranks(2, live, node_size=1)
    assert steps_of(opts) == [2, 1]


def test_a_rank_that_receives_wrong_bytes_stays_with_the_others_and_all_take_the_one_before(tmp_path):
    """A bit that TCP's sums let through: a rank that left the broadcasts let the others wait ten minutes."""
    opts, _ = two_checkpoints(tmp_path / "node0")

    def live(world):
        real = relay.sha
        count = itertools.count(1)
        if world.rank:
            relay.sha = lambda data: "0" * 64 if next(count) == 2 else real(data)
        return resumes_at(of_node(tmp_path, world), 1, world=world)

    assert fork_ranks(2, live, node_size=1) == [True, True]
    assert steps_of(opts) == [1]
