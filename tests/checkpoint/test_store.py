"""What goes into the store comes out of it, whatever the net is made of; what a life does with its
checkpoints.
"""

import math
import os
import shutil
from dataclasses import replace

import pytest
import torch
from refusals import refusal
from stores import (
    a_life,
    announced_rescue,
    at_step,
    full,
    is_at,
    options,
    refused,
    resumes_at,
    save,
    steps_of,
    two_checkpoints,
)
from torch import nn

from common.checkpoint import tensors
from common.checkpoint.fence import Fenced
from common.checkpoint.reader import read_manifest
from common.errors import UserError
from common.extras.chosen import choose
from common.extras.exports import main


class Odd(nn.Module):
    """Everything that real nets bring along."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight  # two names, one storage
        self.norm = nn.BatchNorm2d(4)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 7))
        self.register_parameter("a/b ü", nn.Parameter(torch.zeros(2, 3).t()))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        for name, dtype in tensors.DTYPES.items():
            self.register_buffer(f"{name} values", torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize(
    "flags", [{"optimizer": "sgd", "momentum": 0.0}, {"optimizer": "adamw", "ema_decay": 0.9}], ids=str
)
def test_every_kind_of_tensor_comes_back_as_it_was(tmp_path, flags):
    opts = options(tmp_path, **flags)
    with a_life(opts, Odd()) as life:
        save(life, 7)
    with a_life(opts, Odd()) as life:
        net = life.state.net
        assert life.source == "checkpoints/step-00000007" and is_at(life.state, 7)
        assert net.conv.weight.stride() == Odd().conv.weight.stride()
        assert net.head.weight is net.embed.weight


def test_each_state_is_saved_once_and_none_without_a_step(opts):
    folder = opts.run_dir / "checkpoints/step-00000001"
    with a_life(opts) as life:
        assert life.source is None and not announced_rescue(life.store)
        assert announced_rescue(life.store, 1) and not announced_rescue(life.store)
    before = folder.stat().st_ino
    with a_life(opts) as life:
        save(life, 1)
        assert folder.stat().st_ino == before and steps_of(opts) == [1]


def test_the_newest_ones_the_best_one_and_nothing_else_is_kept(opts):
    with a_life(opts) as life:
        for step in range(1, 9):
            at_step(life.state, step)
            if step == 3:
                life.state.record_evaluation({"val_loss": 1.0, "val_acc": 0.9})
            save(life, step)
    assert sorted(os.listdir(opts.run_dir / "checkpoints")) == [f"step-0000000{step}" for step in (3, 7, 8)]
    for path in opts.run_dir.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("end", ["fails", "is cut short by a kill"])
def test_the_best_one_stays_until_a_better_one_is_on_the_disk(tmp_path, opts, monkeypatch, end):
    """And it counts again, in --best and for the next evaluation, where the better one never comes."""
    with a_life(opts) as life:
        for step, accuracy in ((1, 0.90), (2, 0.80)):
            at_step(life.state, step).record_evaluation({"val_loss": 1.0, "val_acc": accuracy})
            save(life, step)
        at_step(life.state, 3).record_evaluation({"val_loss": 1.0, "val_acc": 0.95})
        if end == "fails":
            with monkeypatch.context() as patch, pytest.raises(OSError):
                patch.setattr(tensors, "write_file", full)
                save(life, 3)
            for step in (4, 5, 6):
                save(life, step)
        else:
            assert announced_rescue(life.store, 5)
    with a_life(opts) as life:
        assert life.state.progress.best == {"val_acc": 0.90, "loss": 1.0, "step": 1}
        assert "no checkpoint of step 3" in life.said[0] and steps_of(opts)[-1] == 1
        at_step(life.state, 7).record_evaluation({"val_loss": 1.0, "val_acc": 0.10})
        save(life, 7)
    assert choose(opts.run_dir, "best")[0] == 1
    with a_life(options(tmp_path / "new", resume=str(opts.run_dir))) as life:
        assert life.state.progress.best == {"step": 7}, "of a run that has no checkpoint of step 1"


def test_a_start_deletes_what_is_superfluous_once_its_first_step_is_made(tmp_path):
    opts, _ = two_checkpoints(tmp_path, steps=(1, 2, 3), keep=3)
    with a_life(replace(opts, keep=2)) as life:
        assert steps_of(opts) == [3, 2, 1]
        life.store.check()
        life.store.saver.wait()
        assert steps_of(opts) == [3, 2]


def test_a_damaged_newest_is_put_aside_until_a_newer_one_is_saved_and_its_step_can_be_saved_again(tmp_path):
    opts, root = two_checkpoints(tmp_path, steps=(3, 4, 5, 10), keep=4)
    opts = replace(opts, keep=2)  # two are superfluous from now on
    model = root / "step-00000010/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\xff")
    with a_life(opts) as life:
        assert is_at(life.state, 5)
        damage, then = life.said
        assert (
            "model.safetensors has sha256" in damage and "manifest says" in damage and "after step 5" in then
        )
        life.store.check()
        life.store.saver.wait()
        assert (root / "damaged-step-00000010").is_dir()
        assert announced_rescue(life.store, 7), "below the damaged one, and not lost to it"
        save(life, 10)
    assert sorted(os.listdir(root)) == ["step-00000007", "step-00000010.1"]
    assert resumes_at(opts, 10)


def test_when_all_are_damaged_nothing_starts_afresh_by_itself(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    for folder in root.iterdir():
        os.truncate(folder / "state.json", 3)
    assert "--run-dir NEW" in refused(opts, "2 checkpoints found, none verifies", code=3)
    assert steps_of(opts) == [2, 1]


def test_a_save_is_due_after_so_many_steps_or_seconds_whichever_comes_first(tmp_path, now):
    def due(step, later=0):
        now.seconds += later
        at_step(life.state, step)
        return life.store.due()

    with a_life(options(tmp_path, save_every=10, save_seconds=60)) as life:
        assert [step for step in range(1, 31) if due(step)] == [10, 20, 30]
        assert due(31, later=60)
        save(life, 31)
        assert not due(31) and not due(32, later=59) and due(40) and due(41, later=1)
    with a_life(options(tmp_path, save_every=0, save_seconds=0)) as life:
        assert not due(60, later=10**6)


def test_a_state_that_is_not_finite_is_never_saved(opts):
    """tests/whole/test_bad_samples.py types the command that it is told."""
    with a_life(opts) as life:
        at_step(life.state, 2).statistics.committed["1.running_mean"].fill_(math.inf)
        assert announced_rescue(life.store), "a mask in a buffer may be infinite"
        life.state.net[0].weight.data[1, 1] = math.nan
        life.state.progress.step = 3
        life.store.save()
        life.store.saver.wait()
        said = f"0.weight is no longer finite(.|\n)*--run-dir NEW --resume {opts.run_dir} --lr X"
        with refusal(said, code=5):
            life.store.check()
        assert life.state.invalid and not announced_rescue(life.store)
    assert steps_of(opts) == [2]


def test_a_state_cut_in_two_is_never_saved(opts):
    with a_life(opts) as life:
        at_step(life.state, 1).invalidate(UserError("half a step"))
        life.store.save()
        assert not announced_rescue(life.store)
    assert steps_of(opts) == []


@pytest.mark.parametrize("victim", ["checkpoints", "."])
def test_a_job_whose_folder_is_removed_ends_fenced(opts, victim):
    with a_life(opts) as life:
        save(life, 1)
        shutil.rmtree(opts.run_dir / victim)
        with pytest.raises(Fenced, match="taken over by another life, or removed"):
            save(life, 2)
        with pytest.raises(Fenced):
            announced_rescue(life.store, 3)
    assert steps_of(opts) == []


def test_a_checkpoint_of_another_run_can_be_the_start_of_a_new_one(tmp_path):
    old, root = two_checkpoints(tmp_path / "old", steps=(3, 4))
    for path, step in ((old.run_dir, 4), (root / "step-00000003", 3)):
        opts = options(tmp_path / f"new{step}", resume=str(path), lr=0.5)
        with a_life(opts) as life:
            assert is_at(life.state, step) and life.source == str(path) and steps_of(opts) == []
            save(life, 6)
        assert resumes_at(opts, 6)  # the same command goes on with its own
    with a_life(options(tmp_path / "sgd", resume=str(old.run_dir), optimizer="sgd", ema_decay=0.9)) as life:
        assert not any("exp_avg" in kept for kept in life.state.optimizer.state.values())
    os.truncate(path / "model.safetensors", 9)
    refused(replace(opts, run_dir=tmp_path / "new"), "no whole checkpoint", code=3)


def test_the_list_and_the_digest_tell_what_is_there(tmp_path, capsys):
    opts, root = two_checkpoints(tmp_path)
    run = str(opts.run_dir)
    os.truncate(root / "step-00000002/optimizer.safetensors", 8)
    assert main([run]) == 0 and "damaged: optimizer.safetensors is 8 bytes" in capsys.readouterr().out
    assert main([run, "--digest"]) == 0
    name, *_, digest = capsys.readouterr().out.split()
    assert (name, digest) == ("step-00000001", read_manifest(root / name)["digest"])
    os.truncate(root / "step-00000001/optimizer.safetensors", 8)
    assert main([run]) == 3 and main([str(tmp_path)]) == 2
