"""What goes into the store comes out of it, whatever the net is made of; what a life does with its
checkpoints.
"""

import contextlib
import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_streams
from refusals import refusal
from stores import (
    a_life,
    announced_rescue,
    at_step,
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
from common.checkpoint.__main__ import main
from common.checkpoint.fence import Fenced
from common.checkpoint.reader import read_facts, read_manifest
from common.errors import UserError
from common.extras.chosen import choose
from common.options import extra


def fails(*_):
    raise OSError("No space left on device")


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
        for dtype in (
            torch.bool,
            torch.bfloat16,
            torch.float16,
            torch.int8,
            torch.uint8,
            torch.int64,
            torch.float64,
            torch.complex64,
        ):
            self.register_buffer(f"{str(dtype)[6:]} values", torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "sgd without momentum", "adamw with averages"])
def test_every_kind_of_tensor_comes_back_as_it_was(tmp_path, optimizer):
    flags = {"optimizer": optimizer.split()[0]} | ({"momentum": 0.0} if "without" in optimizer else {})
    opts = options(tmp_path, **flags, ema_decay=0.9 if "averages" in optimizer else 0.0)
    with a_life(opts, Odd()) as life:
        save(life, 7)
    with a_life(opts, Odd()) as life:
        assert life.source == "checkpoints/step-00000007" and is_at(life.state, 7)
        strides = life.state.net.conv.weight.stride()
        assert strides == Odd().conv.weight.stride()
        assert life.state.net.head.weight is life.state.net.embed.weight


def test_a_rescue_saves_each_state_once_and_none_without_a_step(tmp_path):
    opts = options(tmp_path)
    with a_life(opts) as life:
        assert life.source is None and not announced_rescue(life.store)
        at_step(life.state, 1)
        assert announced_rescue(life.store) and not announced_rescue(life.store)
    with a_life(opts) as life:
        before = os.stat(opts.run_dir / "checkpoints" / "step-00000001").st_ino
        life.store.save()
        life.store.saver.wait()
        assert os.stat(opts.run_dir / "checkpoints" / "step-00000001").st_ino == before
    assert steps_of(opts) == [1]


def test_the_newest_ones_the_best_one_and_nothing_else_is_kept(tmp_path):
    opts = options(tmp_path)
    with a_life(opts) as life:
        for step in range(1, 9):
            at_step(life.state, step)
            if step == 3:
                life.state.record_evaluation({"val_loss": 1.0, "val_acc": 0.9})
            save(life, step)
    assert steps_of(opts) == [8, 7, 3]
    assert sorted(path.name for path in (opts.run_dir / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000007",
        "step-00000008",
    ]
    assert all(
        oct(path.stat().st_mode & 0o777) == ("0o700" if path.is_dir() else "0o600")
        for path in opts.run_dir.rglob("*")
    )


def test_where_nothing_was_evaluated_a_save_reads_no_other_checkpoint(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        "common.checkpoint.reader.read_manifest", lambda path: read.append(path.name) or read_manifest(path)
    )
    with a_life(options(tmp_path, keep=9)) as life:
        for step in range(1, 6):
            save(life, step)
        read.clear()
        save(life, 6)
    assert {name.partition(".")[0] for name in read} == {"step-00000006"}


@pytest.mark.parametrize("end", ["fails", "is cut short by a kill"])
def test_the_best_one_stays_until_a_better_one_is_on_the_disk(tmp_path, monkeypatch, end):
    """And it counts again, in --best and for the next evaluation, where the better one never comes."""
    opts = options(tmp_path)
    with a_life(opts) as life:
        for step, accuracy in ((1, 0.90), (2, None), (3, 0.95)):
            at_step(life.state, step)
            if accuracy:
                life.state.record_evaluation({"val_loss": 1.0, "val_acc": accuracy})
            if step < 3:
                save(life, step)
        if end == "fails":
            with monkeypatch.context() as patch, pytest.raises(OSError):
                patch.setattr(tensors, "write_file", fails)
                save(life, 3)
            for step in (4, 5, 6):
                save(life, step)
        else:
            assert announced_rescue(life.store, 5)
    with a_life(opts) as life:
        assert life.state.progress.best == {"val_acc": 0.90, "loss": 1.0, "step": 1}
        assert steps_of(opts)[-1] == 1
        at_step(life.state, 7).record_evaluation({"val_loss": 1.0, "val_acc": 0.10})
        save(life, 7)
    assert choose(opts.run_dir, "best")[0] == 1


def test_what_is_put_aside_stays_until_a_newer_one_is_saved(tmp_path):
    _, root = two_checkpoints(tmp_path, steps=(1, 2, 3, 4), keep=4)
    os.truncate(root / "step-00000004/model.safetensors", 9)
    with a_life(options(tmp_path, keep=2)) as life:  # step 1 is superfluous from now on
        life.store.check()
        life.store.saver.wait()
        assert life.state.progress.step == 3 and (root / "damaged-step-00000004").is_dir()
        save(life, 5)
    assert sorted(os.listdir(root)) == ["step-00000003", "step-00000005"]


def test_a_start_deletes_what_is_superfluous_once_its_first_step_is_made(tmp_path):
    two_checkpoints(tmp_path, steps=(1, 2, 3), keep=3)
    opts = options(tmp_path, keep=2)
    with a_life(opts) as life:
        assert steps_of(opts) == [3, 2, 1]
        life.store.check()
        life.store.saver.wait()
        assert steps_of(opts) == [3, 2]


def test_a_damaged_newest_is_put_aside_and_its_step_can_be_saved_again(tmp_path):
    opts, root = two_checkpoints(tmp_path, steps=(5, 10))
    with open(root / "step-00000010" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    said = []
    with a_life(opts, said=said) as life:
        assert is_at(life.state, 5)
        assert "model.safetensors has sha256" in said[0] and "manifest says" in said[0]
        assert "after step 5" in said[1]
        # below the damaged one, and not lost to it
        assert announced_rescue(life.store, 7)
        save(life, 10)
    assert steps_of(opts) == [10, 7] and (root / "damaged-step-00000010").exists() is False
    assert resumes_at(opts, 10)


def test_when_all_are_damaged_nothing_starts_afresh_by_itself(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    for folder in root.iterdir():
        os.truncate(folder / "state.json", 3)
    assert "--run-dir NEW" in refused(opts, "2 checkpoints found, none verifies", code=3)
    assert steps_of(opts) == [2, 1]


def test_a_save_is_due_after_so_many_steps_or_seconds_whichever_comes_first(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("common.store.store.time.monotonic", lambda: now[0])

    def due(step, later=0):
        now[0] += later
        at_step(life.state, step)
        return life.store.due()

    with a_life(options(tmp_path, save_every=10, save_seconds=60)) as life:
        assert [step for step in range(1, 31) if due(step)] == [10, 20, 30]
        assert due(31, later=60)
        save(life, 31)
        assert not due(31) and not due(32, later=59) and due(40) and due(41, later=1)
        save(life, 50)
        job = life.store.saver.job
        at_step(life.state, 50)
        life.store.save()
        assert life.store.saver.job is job, "this very state is saved already"
    with a_life(options(tmp_path, save_every=0, save_seconds=0)) as life:
        assert not due(60, later=10**6)


def test_a_copy_is_complete_whichever_gpu_has_the_tensors():
    """A net over two GPUs, frozen on the first: its optimizer is on the second, training asks the first."""
    with fake_streams():
        weight = torch.ones(3)
        image = tensors.Image({"weight": weight})
        image.copy({"weight": weight})
        weight.zero_()
        assert image.views["weight"].tolist() == [1, 1, 1]


def test_memory_that_a_gpu_does_not_lock_serves_too_and_its_error_is_heard_by_no_other_call(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch, "zeros", lambda *_, **where: asked.append(where["device"]))
    gpu = torch.device("cuda", 1)
    assert not extra("pinned")(torch.ones(3), gpu) and asked == [gpu]


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
    opts = options(tmp_path)
    with a_life(opts) as life:
        save(life, 1)
        at_step(life.state, 2)
        life.state.net[1].running_mean.fill_(math.inf)  # a mask in a buffer may be infinite
        save(life, 2)
        with torch.no_grad():
            life.state.net[0].weight[1, 1] = math.nan
        life.state.progress.step = 3
        life.store.save()
        life.store.saver.wait()
        with refusal("0.weight is no longer finite", code=5) as told:
            life.store.check()
        assert life.state.invalid
        assert not announced_rescue(life.store)
        assert f"--run-dir NEW --resume {opts.run_dir} --lr X" in str(told.value)
        assert "nothing after the newest checkpoint is kept" in str(told.value)
    with a_life(options(tmp_path / "new", resume=str(opts.run_dir), lr=1e-9)) as life:  # what it says works
        assert life.state.progress.step == 2
    assert steps_of(opts) == [2, 1]


def test_a_state_cut_in_two_is_never_saved(tmp_path):
    opts = options(tmp_path)
    with a_life(opts) as life:
        at_step(life.state, 1).invalidate(UserError("half a step"))
        life.store.save()
        assert not announced_rescue(life.store)
    assert steps_of(opts) == []


def test_buffers_are_those_of_the_last_whole_step(tmp_path):
    opts = options(tmp_path)
    with a_life(opts) as life:
        at_step(life.state, 4)
        life.state.net[1].running_mean.fill_(99.0)  # a forward has begun the next step
        assert announced_rescue(life.store)
    assert resumes_at(opts, 4)


@pytest.mark.parametrize("victim", ["checkpoints", "."])
def test_a_job_whose_folder_is_removed_ends_fenced(tmp_path, victim):
    opts = options(tmp_path)
    with a_life(opts) as life:
        save(life, 1)
        shutil.rmtree(opts.run_dir / victim)
        with pytest.raises(Fenced, match="taken over by another life, or removed"):
            save(life, 2)
        with pytest.raises(Fenced):
            announced_rescue(life.store, 3)
    assert steps_of(opts) == []


def test_a_checkpoint_of_another_run_can_be_the_start_of_a_new_one(tmp_path):
    _, root = two_checkpoints(tmp_path / "old", steps=(3, 4))
    for number, (path, step) in enumerate([(root.parent, 4), (root / "step-00000003", 3)]):
        opts = options(tmp_path / f"new{number}", resume=str(path), lr=0.5)
        with a_life(opts) as life:
            assert is_at(life.state, step) and life.source == str(path) and steps_of(opts) == []
            save(life, 6)
        assert resumes_at(opts, 6)  # the same command goes on with its own
    os.truncate(root / "step-00000003" / "model.safetensors", 9)
    again = options(tmp_path / "new3", resume=f"{root}/step-00000003")
    refused(again, "no whole checkpoint", code=3)


def test_the_list_and_the_digest_tell_what_is_there(tmp_path, capsys):
    runs, (root, _) = zip(*(two_checkpoints(tmp_path / name) for name in ("one", "two")), strict=True)
    run = str(root.parent)
    assert [main([str(opts.run_dir), "--digest"]) for opts in runs] == [0, 0]
    digests = {line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert digests == {read_facts(2, root / "step-00000002")[0]["digest"]}
    os.truncate(root / "step-00000002/optimizer.safetensors", 8)
    assert main([run]) == 0 and "damaged: optimizer.safetensors is 8 bytes" in capsys.readouterr().out
    assert main([run, "--digest"]) == 0 and capsys.readouterr().out.startswith("step-00000001")
    os.truncate(root / "step-00000001/optimizer.safetensors", 8)
    assert main([run]) == 3 and main([str(tmp_path)]) == 2
