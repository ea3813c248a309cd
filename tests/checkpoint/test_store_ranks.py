"""Node-local folders or a shared one: the newest checkpoint that anybody has, on every rank; replicas that
differ end the life.
"""
import errno
import os
import time

import pytest
import torch
from ranks import fork_ranks
from stores import (
    a_life,
    announced_rescue,
    at_step,
    end,
    is_at,
    new_store,
    options,
    save,
    steps_of,
    tiny_net,
    tiny_state,
    two_checkpoints,
)
from torch import nn

import train_ddp
from common.checkpoint import fence, files
from common.checkpoint import lock_file as held
from common.checkpoint import store as checkpoint
from common.errors import UserError
from common.options import Options


def of_node(folder, world):
    return options(folder / f"node{world.node}")


def test_the_newest_of_all_nodes_wins_is_sent_to_all_and_kept_by_all(tmp_path):
    two_checkpoints(tmp_path / "node0", steps=(3, 4))
    two_checkpoints(tmp_path / "node1", steps=(8, 9))  # node 2 is new

    def begin(world):
        opts = of_node(tmp_path, world)
        with a_life(opts, world=world) as life:
            return life.source, is_at(life.state, 9), bool(life.store.fence)

    assert fork_ranks(6, begin, node_size=2) == [("checkpoints/step-00000009", True, leads)
                                                 for leads in (True, False) * 3]
    for node in range(3):  # whoever survives has it
        with a_life(options(tmp_path / f"node{node}")) as life:
            assert is_at(life.state, 9)


def test_a_node_that_left_with_the_newest_costs_steps_and_nothing_else(tmp_path):
    """It comes back later with a step that nobody went on from: that one is put aside, and made again."""
    two_checkpoints(tmp_path / "node0", steps=(3, 4))
    two_checkpoints(tmp_path / "node1", steps=(8, 9))

    def begin(world, step):
        opts = of_node(tmp_path, world)
        with a_life(opts, world=world) as life:
            at = life.state.step
            if life.store.fence:
                save(life, step)
        return at

    assert fork_ranks(1, begin, 10) == [4]  # node 1 is away: from what node 0 has
    assert fork_ranks(2, begin, 11, node_size=1) == [10, 10]  # and with it again: the newest of all
    for node in (0, 1):
        assert steps_of(options(tmp_path / f"node{node}"))[0] == 11


def test_damage_on_one_node_is_made_good_by_another_and_damage_on_all_is_refused_by_all(tmp_path):
    for node, steps in ((0, (3, 9)), (1, (3, 4))):
        two_checkpoints(tmp_path / f"node{node}", steps=steps)
    os.truncate(tmp_path / "node0/run/checkpoints/step-00000009/model.safetensors", 7)

    def begin(world):
        with a_life(of_node(tmp_path, world), world=world) as life:
            return is_at(life.state, 4)

    assert fork_ranks(2, begin, node_size=1) == [True, True]
    assert steps_of(options(tmp_path / "node0")) == [4, 3]  # received, kept, and the damaged one put aside
    for node in (0, 1):
        for folder in (tmp_path / f"node{node}/run/checkpoints").glob("step-*"):
            os.truncate(folder / "model.safetensors", 7)

    def refuse(world):
        with pytest.raises(UserError, match="none verifies") as error:
            new_store(of_node(tmp_path, world), world).restore(tiny_state(options(tmp_path)))
        return error.value.code

    assert fork_ranks(2, refuse, node_size=1) == [3, 3]


def test_however_many_of_a_node_are_damaged_the_newest_whole_one_of_any_node_is_found(tmp_path):
    two_checkpoints(tmp_path / "node0", steps=(3, 4))
    two_checkpoints(tmp_path / "node1", steps=(8, 9))
    root = tmp_path / "node1/run/checkpoints"
    for step in range(10, 80):
        (root / f"step-{step:08d}").mkdir()

    def begin(world):
        with a_life(of_node(tmp_path, world), world=world) as life:
            return is_at(life.state, 9)

    assert fork_ranks(3, begin, node_size=1) == [True] * 3
    assert steps_of(options(tmp_path / "node1")) == [9, 8] and len(list(root.glob("damaged-*"))) == 70


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
def test_of_two_checkpoints_with_one_name_and_other_content_the_second_is_tried_too(tmp_path, file):
    """Two nodes that trained apart: each has a step 9 of its own, and the first one is damaged."""
    for node in (0, 1):
        opts = options(tmp_path / f"node{node}")
        with a_life(opts) as life:
            save(life, 3)
            life.state.record = {"step": node}
            save(life, 9)
    os.truncate(tmp_path / "node0/run/checkpoints/step-00000009" / file, 7)

    def begin(world):
        with a_life(of_node(tmp_path, world), world=world, said=(said := [])) as life:
            return is_at(life.state, 9), life.state.record, sum("put aside" in text for text in said)

    assert fork_ranks(3, begin, node_size=1) == [(True, {"step": 1}, told) for told in (1, 0, 0)]
    assert [steps_of(options(tmp_path / f"node{node}")) for node in range(3)] == [[9, 3], [9, 3], [9]]
    assert list((tmp_path / "node0/run/checkpoints").glob("damaged-*"))


def test_what_a_node_cannot_read_is_sent_by_another_that_has_it_and_else_no_step_is_thrown_away(tmp_path,
                                                                                                monkeypatch):
    monkeypatch.setattr(files, "RETRY_SECONDS", (0.0, 0.0))
    for node, steps in ((0, (3, 9)), (1, (3, 9)), (2, (3, 4))):
        two_checkpoints(tmp_path / f"node{node}", steps=steps)
    real = os.preadv

    def begin(world, second):
        def fails(fd, buffers, at):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.endswith("node0/run/checkpoints/step-00000009/model.safetensors"):
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, at)
        os.preadv = fails
        store, state = new_store(options(tmp_path / f"node{second if world.rank else 0}"),
                                 world), tiny_state(options(tmp_path))
        try:
            store.restore(state)
            return is_at(state, 9)
        except UserError as error:
            return error.code, "step-00000009: cannot be read: Input/output error" in str(error)
        finally:
            end(store)

    assert fork_ranks(2, begin, 2, node_size=1) == [(1, True)] * 2
    assert fork_ranks(2, begin, 1, node_size=1) == [True, True]
    assert [steps_of(options(tmp_path / f"node{node}")) for node in range(3)] == [[9, 3], [9, 3], [4, 3]]


def test_a_shared_folder_has_one_owner_and_of_many_rescuers_one_writes(tmp_path):
    opts = options(tmp_path)

    def rescue(world):
        store, state = new_store(opts, world), tiny_state(opts)
        store.restore(state)
        if not store.fence:
            store.save(at_step(state, 3))  # not an owner: nothing happens
        written = announced_rescue(store, at_step(state, 5))
        world.barrier("rescued")
        owned = bool(store.fence)
        store.close()
        return owned, written

    results = fork_ranks(4, rescue, node_size=2)
    assert [owned for owned, _ in results] == [True, False, False, False]
    assert sorted(written for _, written in results) == ["", "", "", "disk"]
    assert steps_of(opts) == [5]


def test_a_shared_folder_that_shows_late_is_still_one_folder(tmp_path):
    """A network file system of which other nodes see neither new names nor new bytes for half a minute."""
    opts = options(tmp_path)

    def begin(world):
        if world.rank:
            for name in ("isdir", "lexists", "exists"):
                real = getattr(os.path, name)
                setattr(os.path, name, lambda path, real=real: ".life-" not in str(path) and real(path))
            held.read = fence.read = lambda fd: {}
        store, began = new_store(opts, world), time.monotonic()
        store.restore(tiny_state(opts))
        owns = bool(store.fence)
        return owns, owns and store.fence.held.is_ours(), time.monotonic() - began < 5

    assert fork_ranks(4, begin, node_size=1) == [(True, True, True)] + [(False, False, True)] * 3


def test_ranks_of_other_code_data_or_options_are_named_with_their_values(tmp_path):
    def begin(world):
        real = checkpoint.versions
        if world.rank == 1:
            checkpoint.versions = lambda *args: real(*args) | {"torch": "1.0"}
        with pytest.raises(UserError) as error:
            new_store(options(tmp_path), world).restore(tiny_state(options(tmp_path)))
        return str(error.value).splitlines()[0]

    said = f"the ranks run different things: rank 0 has torch {torch.__version__}, rank 1 has torch 1.0"
    assert fork_ranks(3, begin) == [said] * 3

    def other_data(world):
        with pytest.raises(UserError, match="rank 0 has data aaaaaaaaaaaa, rank 2 has data bbbbbbbbbbbb"):
            new_store(options(tmp_path), world,
                      "ab"[world.rank // 2] * 64).restore(tiny_state(options(tmp_path)))

    fork_ranks(3, other_data)


def test_ranks_with_different_nets_are_refused_before_a_checkpoint_counts_as_damaged(tmp_path):
    opts, _ = two_checkpoints(tmp_path)

    def begin(world):
        net = tiny_net() if world.rank else nn.Linear(2, 2)  # rank 0 would find all checkpoints damaged
        with pytest.raises(UserError, match=r"rank 0 has net \(names, shapes or types\) \w{12}, rank 1 has"):
            new_store(opts, world).restore(tiny_state(opts, net))

    fork_ranks(2, begin)
    assert steps_of(opts) == [2, 1]


def test_what_one_node_refuses_all_ranks_refuse_with_the_same_words(tmp_path):
    two_checkpoints(tmp_path / "node1", seed=3)

    def begin(world):
        with pytest.raises(UserError) as error:
            new_store(of_node(tmp_path, world), world).restore(tiny_state(options(tmp_path)))
        return str(error.value)

    first, second = fork_ranks(2, begin, node_size=1)
    assert first == second and "--seed was 3, now 0" in first


def test_the_same_start_on_all_ranks_or_none(tmp_path):
    def begin(world):
        state = tiny_state(options(tmp_path))
        with torch.no_grad():
            state.net[0].weight[0, 0] += world.rank
        with pytest.raises(UserError, match="the ranks have made different weights"):
            new_store(options(tmp_path), world).restore(state)
        return state.half_updated

    assert fork_ranks(2, begin) == [True, True]


@pytest.mark.parametrize("flip", ["the lowest bit of a weight", "a buffer", "two weights swapped for others"])
def test_replicas_that_differ_are_noticed_and_nothing_of_theirs_stays(tmp_path, flip):
    opts = options(tmp_path, keep=3)

    def diverge(world):
        store, state = new_store(opts, world), tiny_state(opts)
        store.restore(state)
        store.agree(at_step(state, 1))
        store.save(state)
        at_step(state, 2)
        if world.rank == 1:
            with torch.no_grad():
                if flip == "a buffer":
                    state.buffers.committed["1.num_batches_tracked"] += 1
                elif flip.startswith("the"):
                    state.net[0].weight.view(torch.int32)[1, 2] ^= 1
                else:
                    state.net[0].weight.view(torch.int32)[0, 0] += 1 << 20
                    state.net[0].bias.view(torch.int32)[0] -= 1 << 20
        store.save(state)
        with pytest.raises(RuntimeError,
                           match="step 2: the weights of rank .* going back to step 1, where all agreed"):
            store.agree(state)
        store.save(state)
        rescued = announced_rescue(store, state)
        world.barrier("both have tried")  # as in Rescue: the end takes the staging folder away
        return state.half_updated, rescued, end(store)

    assert fork_ranks(2, diverge) == [(True, "", None)] * 2
    assert steps_of(opts) == [1]


def test_a_flipped_weight_ends_a_real_training_before_it_is_saved(tmp_path):
    """--check-every, in the loop of train_ddp.py: the life ends, and the disk holds only what all agreed on.
    """
    opts = Options(script="ddp", run_dir=tmp_path / "run", model="mlp", dataset="random", epochs=3,
                   max_steps=8, check_every=2,
                   save_every=1, save_seconds=0, global_batch_size=20, progress="off", tensorboard=False)

    def train(world):
        train_ddp.join = lambda opts: world
        real = train_ddp.TrainState.update

        def update(state, size):
            real(state, size)
            if state.step == 5 and world.rank == 1:
                with torch.no_grad():
                    next(state.net.parameters()).view(torch.int32).view(-1)[0] ^= 1
        train_ddp.TrainState.update = update
        with pytest.raises(RuntimeError, match="step 6: the weights of rank"):
            train_ddp.main.__wrapped__.__wrapped__(opts)

    # the second to leave may hear of the first one's end before it raises the same error
    assert set(fork_ranks(2, train, may_die=(0, 1))) <= {None, 1}
    assert steps_of(opts)[0] == 4


def test_a_checkpoint_that_all_agreed_on_is_never_pruned(tmp_path):
    opts = options(tmp_path, keep=2)

    def train(world):
        store, state = new_store(opts, world), tiny_state(opts)
        store.restore(state)
        for step in range(1, 7):
            store.save(at_step(state, step))
            store.wait()
            if step == 2:
                store.agree(state)
        store.close()

    fork_ranks(2, train)
    assert steps_of(opts) == [6, 5, 2]


def test_one_life_after_the_other_with_other_worlds(tmp_path):
    opts = options(tmp_path)

    def live(world, step):
        with a_life(opts, world=world) as life:
            assert step == 1 or is_at(life.state, step - 1)
            if life.store.fence:
                save(life, step)
            world.barrier("saved")

    for step, size in enumerate((1, 3, 2, 4, 1), 1):
        fork_ranks(size, live, step, node_size=2)
    with a_life(opts) as life:
        assert is_at(life.state, 5)
