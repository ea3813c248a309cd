"""Weights that do not train are written once: later checkpoints have a link to the same file."""

import errno
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from stores import (
    Adapted,
    a_life,
    announced_rescue,
    at_step,
    expected,
    is_at,
    options,
    resumes_at,
    save,
    steps_of,
    two_checkpoints,
)

from common.checkpoint import Layout
from common.checkpoint.disk import Damaged
from common.checkpoint.reader import read_manifest
from common.extras.chosen import choose, weights_of
from common.extras.exports import main
from common.extras.frozen import FrozenLayout

STILL = {"still.weight", "still.bias", "still_too.weight"}


def inodes(opts):
    """{step: the inode of its file of frozen weights}"""
    files = (opts.run_dir / "checkpoints").glob("step-*/frozen.safetensors")
    return {int(path.parent.name[5:]): path.stat().st_ino for path in files}


class Head(Adapted):
    """Its state_dict leaves a frozen weight out; another one is a mask."""

    def state_dict(self, *args, **kwargs):
        return {name: t for name, t in super().state_dict(*args, **kwargs).items() if name != "still.bias"}


def test_what_is_frozen_may_be_infinite_and_be_left_out_of_a_nets_state(opts):
    net = Head()
    net.still.weight.data[0, 0] = -torch.inf
    with a_life(opts, net) as life:
        save(life, 1)
    assert resumes_at(opts, 1, net)


@pytest.mark.parametrize("frozen", [True, False])
def test_only_a_run_with_weights_that_stand_still_has_another_file_and_another_format(tmp_path, frozen):
    """Code that does not know the file refuses that format, and calls nothing damaged."""
    _, root = two_checkpoints(tmp_path, net=Adapted(frozen))
    for folder in root.iterdir():
        assert (folder / "frozen.safetensors").exists() == frozen
        assert read_manifest(folder)["format"] == 7 + frozen


def test_saves_and_rescues_write_what_trains_and_each_checkpoint_is_whole_by_itself(tmp_path):
    opts = options(tmp_path, keep=3)
    for step in (1, 3):
        with a_life(opts, Adapted()) as life:
            save(life, step)
            assert announced_rescue(life.store, step + 1)
    found = inodes(opts)
    assert {*found} == {1, 2, 3, 4} and len({*found.values()}) == 1
    folder = shutil.copytree(opts.run_dir / "checkpoints/step-00000004", tmp_path / "step-00000004")
    shutil.rmtree(opts.run_dir)
    assert {*load_file(folder / "frozen.safetensors")} == STILL
    assert not {*load_file(folder / "model.safetensors")} & STILL
    assert main([str(folder), "--export", str(tmp_path / "w.safetensors")]) == 0
    found = load_file(tmp_path / "w.safetensors")
    assert {*found} == {*Adapted().state_dict()} - {"still_too.weight"}
    assert all(torch.equal(tensor, expected(tensor, 4, name)) for name, tensor in found.items())


def test_a_weight_that_moves_though_it_does_not_train_is_written(opts):
    """An average, a second net: torch does not count all of these changes."""
    values = {}
    with a_life(opts, Adapted()) as life:
        still = life.state.net.still.weight
        for step in (1, 2, 3):
            at_step(life.state, step)
            still.detach().numpy()[0, 0] += step
            values[step] = still.clone()
            if step < 3:
                life.store.save()
                life.store.saver.wait()
        assert announced_rescue(life.store)
    for step, value in values.items():
        assert torch.equal(weights_of(opts.run_dir, step)[0]["still.weight"], value)


def test_what_stands_still_may_be_another_in_the_next_life(opts, monkeypatch):
    """And a run of before, which has all in one file, goes on; its digest does not depend on that."""
    digests = set()
    for k, frozen in enumerate((False, True, False)):
        layout = FrozenLayout if frozen else lambda tensors, frozen: Layout(tensors)
        monkeypatch.setattr("common.extras.frozen.FrozenLayout", layout)
        with a_life(opts, Adapted()) as life:
            assert k == 0 or is_at(life.state, 1)
            life.state.progress.record = {"step": k}
            save(life, 1)
        _, folder, line = choose(opts.run_dir, "newest")
        assert (folder / "frozen.safetensors").exists() is frozen
        digests.add(line.split()[-1])
    assert folder.name == "step-00000001.2" and len(digests) == 1


def test_where_links_cannot_be_each_checkpoint_has_a_copy(tmp_path, monkeypatch):
    def refuses(source, target):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(source))

    monkeypatch.setattr(os, "link", refuses)
    opts, _ = two_checkpoints(tmp_path, net=Adapted())
    assert len({*inodes(opts).values()}) == 2 and choose(opts.run_dir, 2) and choose(opts.run_dir, 1)


def test_damage_of_the_one_file_is_found_by_the_next_save_and_made_good_by_the_one_after_it(tmp_path):
    """All checkpoints have that file; what the process holds is right."""
    opts = options(tmp_path, keep=3)
    file = opts.run_dir / "checkpoints/step-00000001/frozen.safetensors"
    with a_life(opts, Adapted()) as life:
        save(life, 1)
        save(life, 2)
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        with pytest.raises(Damaged, match="frozen.safetensors"):
            save(life, 3)
        assert steps_of(opts) == [2, 1], "nothing goes before a newer one is whole"
        save(life, 4)
        save(life, 5)
    assert inodes(opts)[4] == inodes(opts)[5] != inodes(opts)[2]
    assert resumes_at(opts, 5, Adapted())


def test_a_start_that_has_found_damage_links_to_nothing(tmp_path):
    opts, root = two_checkpoints(tmp_path, net=Adapted())
    os.truncate(root / "step-00000002/model.safetensors", 7)
    with a_life(opts, Adapted()) as life:
        assert life.state.progress.step == 1
        save(life, 3)
    assert inodes(opts)[1] != inodes(opts)[3]
