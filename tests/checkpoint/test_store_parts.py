"""A checkpoint of which each rank writes and reads what it owns: a wrong byte is found, wherever it is."""

import contextlib
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from ranks import fork_ranks
from refusals import refusal
from samples import state_of
from stores import (
    announced_rescue,
    at_step,
    end,
    heard,
    is_at,
    options,
    resumes_at,
    steps_of,
    two_checkpoints,
    write,
)
from torch import nn

from common.checkpoint import Layout, Writer, describe, reader
from common.checkpoint.__main__ import main
from common.checkpoint.disk import Damaged
from common.checkpoint.fence import Fence
from common.checkpoint.folder import checkpoints, committed
from common.checkpoint.tensors import read_file, write_file
from common.store import CheckpointStore

STAGES = 2


def whole_net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 2 + i) for i in range(STAGES)))


def store_of(world, folder, odd=None):
    """(store, state) of this rank's stage; rank `odd` has another net."""
    world = world.in_stages(STAGES)
    opts = options(folder, script="mp", stages=STAGES)
    layers = enumerate(whole_net())
    net = nn.Sequential(*(layer if i == world.stage else nn.Identity() for i, layer in layers))
    if world.rank == odd:
        net.append(nn.Linear(2, 2))
    state = state_of(net, opts, 640)
    return CheckpointStore(opts, world, "f" * 64), state


def test_a_folder_that_another_rank_has_taken_and_a_third_made_anew_is_never_named(tmp_path, monkeypatch):
    """Two ranks see all parts at once; what a third adds later must not become the newest checkpoint."""

    def commit(number):
        writer = Writer(Fence(tmp_path, "life"), {}, Layout({}, {}, {}, number, 2))
        return writer.commit({"model": {f"w{number}": torch.ones(2)}, "optimizer": {}}, facts)

    def others_are_faster(source, target):
        if Path(source).name.startswith("gathered-") and Path(source).is_dir():
            monkeypatch.setattr(os, "rename", rename)
            assert commit(1).name == "step-00000005"
            assert commit(0) is None
        rename(source, target)

    (tmp_path / "checkpoints/.life-life").mkdir(parents=True)
    facts = {
        "step": 5,
        "epoch": 0,
        "record": {},
        "order": [9, 0],
        "best": {"step": 0},
        "evaluated": {},
        "scaler": None,
        "tied": {},
        "data": {},
        "position": 0,
    }
    rename = os.rename
    assert commit(0) is None
    monkeypatch.setattr(os, "rename", others_are_faster)
    assert commit(1) is None
    assert [describe(*found)[0] for found in checkpoints(tmp_path)] == [True]
    assert commit(1).name == "step-00000005.1", "the third one's part is still there"
    assert [describe(*found)[0] for found in checkpoints(tmp_path)] == [True, True]


def flip(path):
    """A bit of its last byte."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 64]))


def saved(store, state, step):
    write(store, step)
    store.world.barrier()
    error = store.saver.error
    store.saver.error = None
    return str(error or "")


@contextlib.contextmanager
def staged(world, folder, said=None):
    """(store, state) of this rank's stage, restored, until all ranks are here."""
    store, state = store_of(world, folder)
    with heard(said):
        store.restore(state)
        yield store, state
        world.barrier()
    end(store)


def save_in_stages(folder, steps):
    def live(world):
        with staged(world, folder) as (store, state):
            return "".join(saved(store, state, step) for step in steps)

    assert fork_ranks(STAGES, live) == [""] * STAGES


def load_in_stages(folder):
    """[(step, whether all tensors are of it, what was said)] of each rank."""

    def live(world):
        with staged(world, folder, said := []) as (_, state):
            return state.progress.step, is_at(state, state.progress.step), said

    return fork_ranks(STAGES, live)


def test_each_rank_writes_its_own_files_and_the_digest_is_that_of_one_file(tmp_path, capsys):
    save_in_stages(tmp_path / "parts", [1, 2])
    two_checkpoints(tmp_path / "whole", net=whole_net(), script="mp")
    digests = []
    for place in ("parts", "whole"):
        assert main([str(tmp_path / place / "run"), "--digest"]) == 0
        digests.append(capsys.readouterr().out.split()[-1])
    folder = tmp_path / "parts/run/checkpoints/step-00000002"
    assert digests[0] == digests[1] == json.loads((folder / "manifest.json").read_text())["digest"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "part-00001",
        "part-00002",
        "state.json",
    ]
    assert load_in_stages(tmp_path / "whole") == [(2, True, [])] * 2  # cut, and
    assert resumes_at(options(tmp_path / "parts", script="mp"), 2, whole_net())  # put together again
    assert not list((tmp_path / "parts/run/checkpoints").glob(".life-*"))


@pytest.mark.parametrize("odd", range(2 * STAGES))
def test_a_stage_that_its_replicas_hold_differently_is_refused_by_all(tmp_path, odd):
    """Of the first replica the others take their word; so one of the second may be the only one to see it."""

    def live(world):
        store, state = store_of(world, tmp_path, odd)
        with refusal("the ranks run different things: rank 0 has net"):
            store.restore(state)

    fork_ranks(2 * STAGES, live)


def test_stages_whose_machines_have_run_folders_of_their_own_are_refused_and_leave_nothing_there(tmp_path):
    def live(world):
        store, state = store_of(world, tmp_path / f"node{world.rank // world.local_size}")
        with refusal("rank 1 does not see the folder of rank 0"):
            store.restore(state)
        end(store)

    fork_ranks(STAGES, live, node_size=1)
    assert not [*tmp_path.glob("node1/run/*.json"), *tmp_path.glob("node1/run/checkpoints/*")]


@pytest.mark.parametrize("which", ["model", "optimizer"])
@pytest.mark.parametrize("part", ["", "part-00002/"], ids=["whole", "parts"])
def test_damage_that_one_rank_alone_reads_makes_all_take_the_one_before(tmp_path, part, which):
    if part:
        save_in_stages(tmp_path, [1, 2])
    else:
        two_checkpoints(tmp_path, net=whole_net(), script="mp")
    flip(tmp_path / f"run/checkpoints/step-00000002/{part}{which}.safetensors")
    found = load_in_stages(tmp_path)
    assert [(step, whole) for step, whole, _ in found] == [(1, True)] * 2
    assert sum(f"{which}.safetensors has sha256" in text for _, _, said in found for text in said) == 1
    assert (tmp_path / "run/checkpoints/damaged-step-00000002").is_dir()


@pytest.mark.parametrize("how", ["flipped", "away", "a link"])
def test_a_rank_that_does_not_read_what_the_others_read_gets_it_from_them(tmp_path, monkeypatch, how):
    """The cache or the memory of another machine may give other bytes; a network shows names late."""
    save_in_stages(tmp_path, [1, 2])
    monkeypatch.setattr("common.checkpoint.disk.RETRY_SECONDS", ())  # after the save: it needs them at times
    other = tmp_path / "elsewhere"

    def live(world):
        if world.rank:
            import shutil

            shutil.copytree(tmp_path / "run/checkpoints", other)
            folder = other / "step-00000002"
            file = folder / "part-00002/model.safetensors"
            if how == "flipped":
                flip(file)
            elif how == "away":
                shutil.rmtree(folder)
            elif how == "a link":
                os.rename(file, tmp_path / "file")
                file.symlink_to(tmp_path / "file")
            monkeypatch.setattr("common.store.load.checkpoints", lambda run: committed(other))
        with staged(world, tmp_path, said := []) as (_, state):
            return is_at(state, 2), bool(said)

    assert fork_ranks(STAGES, live) == [(True, False), (True, how != "away")]
    assert steps_of(options(tmp_path)) == [2, 1]


def test_the_first_of_two_ranks_with_the_same_part_is_taken_and_two_may_finish_at_once(tmp_path):
    """Four ranks, two replicas of two stages, all in a rescue: no lock, and one whole checkpoint."""

    def live(world):
        with staged(world, tmp_path) as (store, state):
            at_step(state, 5)
            world.barrier()
            told = announced_rescue(store)
            world.barrier()
            return told.startswith("step 5 saved"), [step for step, _ in committed(store.fence.root)]

    results = fork_ranks(2 * STAGES, live)
    assert sum(named for named, _ in results) >= 1 and results[0][1][0] == 5
    opts = options(tmp_path, script="mp")
    for step, folder in checkpoints(opts.run_dir):
        assert step == 5 and describe(step, folder)[0]
    assert resumes_at(opts, 5, whole_net())


def test_a_part_that_never_comes_leaves_the_one_before_and_is_swept_with_the_next_whole_one(tmp_path):
    def live(world):
        def gathered():
            return len(list(store.writer.staging.glob("gathered-*")))

        with staged(world, tmp_path) as (store, state):
            errors = saved(store, state, 1)
            if world.rank == 0:
                write(store, 2)
            world.barrier()
            half = [step for step, _ in committed(store.fence.root)], gathered()
            world.barrier()
            errors += saved(store, state, 3)
            return errors, half, gathered()

    assert fork_ranks(STAGES, live) == [("", ([1], 1), 0)] * STAGES
    assert steps_of(options(tmp_path)) == [3, 1]


def test_rows_of_a_tensor_are_read_out_of_parts_of_any_size(tmp_path):
    """What --shard does: a rank owns some rows."""
    a = torch.arange(14, dtype=torch.float64).view(7, 2)
    b = torch.arange(5, dtype=torch.int16)
    whole = {"model": {"a": ["F64", [7, 2]], "b": ["I16", [5]]}, "optimizer": {}}

    def rank(start, count, writes_unsharded=True):
        """(its layout, its tensors)"""
        own = {"a": a[start : start + count].clone(), "b": b.clone()}
        tensors = {"model": own, "optimizer": {}}
        return Layout(tensors, {"a": (start, 7)}, whole, writes_unsharded=writes_unsharded), own

    for cuts in (
        [(0, 7)],
        [(0, 4), (4, 3)],
        [(0, 3), (3, 3), (6, 1)],
        [(0, 1), (1, 1), (2, 0), (2, 3), (5, 2)],
    ):
        files = {}  # the tables of a checkpoint of as many ranks as there are cuts
        for replica, (start, rows) in enumerate(cuts):
            layout, own = rank(start, rows, replica == 0)
            path = tmp_path / f"{len(cuts)}/part-{replica + 1:05d}/model.safetensors"
            path.parent.mkdir(parents=True)
            files[str(path)] = write_file(path, layout.written(layout.tensors)["model"], layout.rows)
        for first, last in itertools.combinations_with_replacement(range(8), 2):
            layout, own = rank(first, last - first)
            for tensor in own.values():
                tensor.zero_()
            layout.check(files)
            for path, table in files.items():
                read_file(Path(path), table, layout.buffers(path, table), count=2)
            assert torch.equal(own["a"], a[first:last]) and torch.equal(own["b"], b)
        for path, (_, rows) in zip(files, cuts, strict=True):
            with pytest.raises(Damaged, match="row|this run has") if rows else contextlib.nullcontext():
                layout.check({name: table for name, table in files.items() if name != path})


def test_a_rank_that_receives_wrong_bytes_stays_with_the_others_and_all_take_the_one_before(tmp_path):
    """A bit that TCP's sums let through: a rank that left the broadcasts let the others wait ten minutes."""
    two_checkpoints(tmp_path / "node0")

    def live(world):
        opts = options(tmp_path / f"node{world.rank // world.local_size}")
        real = reader.sha
        count = []

        def sha(data):
            count.append(data)
            return "0" * 64 if len(count) == 2 else real(data)

        if world.rank:
            reader.sha = sha
        return resumes_at(opts, 1, world=world)

    assert fork_ranks(2, live, node_size=1) == [True, True]
    assert steps_of(options(tmp_path / "node0")) == [1]
