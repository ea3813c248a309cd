"""What one GPU shows, the most valuable first: lease.py runs them. Skipped where there is none."""

import json
import random
import signal
import time

import pytest
from gpus import CHECKS, SMALL, TEXT, begin, devices, end, fake, needs, pids, train
from jobs import CLEAN, ROOT, audit, digest, events, losses, rows, steps_on_disk, until

pytestmark = needs(1)
WRONG = """
import torch
class Wrong(torch.nn.Module):  # it reads behind the end of a table in its sixth forward
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 10)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return self.table(torch.full((len(x),), 99 if self.calls == 6 else 0, device=x.device))
"""


def test_a_run_learns_ends_and_is_complete_and_audited(jobs, tmp_path):
    out = train(jobs, tmp_path, "train_ddp.py", "--epochs=3", "--audit")
    assert fake() or "devices cuda:0 " in out
    assert "complete" in train(jobs, tmp_path, "train_ddp.py", "--epochs=3")
    assert audit(tmp_path) == CLEAN and digest(tmp_path)
    assert [row["val_acc"] for row in rows(tmp_path) if "val_acc" in row][-1] > 0.95


@pytest.mark.skipif(fake(), reason="a CPU has no streams")
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--amp=fp16",),
        ("--channels-last", "--model=resnet18"),
        ("--log-every=1",),  # the main thread stands in a copy
        ("--model=gpt:48x4x64", *TEXT[1:], "--global-batch-size=4"),  # in the launches of a deep net
    ],
)
def test_a_rescue_does_not_queue_behind_a_stream_that_hangs(jobs, tmp_path, flags):
    flags = ("--save-every=0", "--save-seconds=0", "--epochs=20", *flags)
    train(jobs, tmp_path, CHECKS, *flags, code=143, check=["stuck_stream"])
    assert steps_on_disk(tmp_path) == [20]


def test_a_save_that_is_still_copied_holds_the_weights_and_not_their_averages(jobs):
    assert "differ: 0" in end(begin(jobs, CHECKS, "late_copy", *(["cpu"] if fake() else [])))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--model=resnet18",),
        TEXT,
        (*TEXT, "--amp=bf16"),
        ("--model=lstm", "--dataset=sentiment"),
        pytest.param(
            ("--amp=fp16", "--clip-grad-norm=1"), marks=pytest.mark.skipif(fake(), reason="GPUs only")
        ),
    ],
)
def test_two_runs_have_one_digest_and_a_killed_one_has_it_too(jobs, tmp_path, flags):
    flags = (*SMALL, "--virtual-ranks=8", *flags)
    for name in ("a", "b"):
        train(jobs, tmp_path / name, "train_ddp.py", *flags)
    flags = (*flags, "--save-every=5")
    job = begin(jobs, "train_ddp.py", *flags, f"--run-dir={tmp_path}/c", "--no-tensorboard")
    until(lambda: steps_on_disk(tmp_path / "c") or job.poll() is not None, "a checkpoint")
    job.kill()
    job.wait()
    train(jobs, tmp_path / "c", "train_ddp.py", *flags)
    assert len({digest(tmp_path / name) for name in "abc"}) == 1


def test_every_checkpoint_is_that_of_a_run_whose_kernels_block(jobs, tmp_path):
    flags = ("--virtual-ranks=2", "--save-every=1", "--max-steps=30", "--keep=40")
    found = {}
    for blocking in "01":
        train(jobs, tmp_path / blocking, "train_ddp.py", *flags, CUDA_LAUNCH_BLOCKING=blocking)
        for path in (tmp_path / blocking / "checkpoints").glob("step-*/manifest.json"):
            manifest = json.loads(path.read_text())
            found.setdefault(manifest["step"], []).append(manifest["digest"])
    both = [digests for digests in found.values() if len(digests) == 2]  # a save may be left out
    assert len(both) > 5 and all(one == other for one, other in both)


def test_a_stop_at_a_random_moment_is_saved_in_seconds(jobs, tmp_path):
    amp = "bf16" if fake() else "fp16"
    flags = (f"--run-dir={tmp_path}", f"--amp={amp}", "--ema-decay=0.9", "--epochs=500", "--no-tensorboard")
    job = begin(jobs, "train_ddp.py", *flags)
    until(lambda: events(tmp_path, "first_step") or job.poll() is not None, "the first step")
    time.sleep(random.random())  # the moment is what is tried
    asked = time.monotonic()
    job.kill(signal.SIGTERM)
    end(job, 143)
    assert time.monotonic() - asked < 30 and steps_on_disk(tmp_path)


def test_stages_on_one_gpu_have_the_digest_and_the_loss_of_the_whole_net(jobs, tmp_path):
    """The net draws dropout in several stages; without --virtual-ranks a GPU adds up in any order."""
    train(jobs, tmp_path / "ddp", "train_ddp.py", *SMALL, "--virtual-ranks=8")
    train(jobs, tmp_path / "mp", "train_mp.py", *SMALL, "--virtual-ranks=8", devices(0, 0))
    assert digest(tmp_path / "ddp") == digest(tmp_path / "mp")
    model = (*SMALL, "--micro-batch-size=8", *TEXT, "--log-every=1")
    train(jobs, tmp_path / "whole", "train_ddp.py", *model)
    train(jobs, tmp_path / "cut", "train_mp.py", devices(0, 0), *model)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), abs=1e-3)


@pytest.mark.skipif(fake(), reason="CPUs have the operation with fixed bits")
def test_a_layer_without_fixed_bits_is_named_and_refused(jobs, tmp_path):
    data = f"--dataset={ROOT}/tests/tools/nets.py:large_pictures"
    flags = ("--model=alexnet", "--virtual-ranks=2", "--max-steps=1", data)
    out = train(jobs, tmp_path, "train_ddp.py", *flags, code=2)
    assert "adaptive_avg_pool2d_backward_cuda" in out and "--virtual-ranks" in out and "Traceback" not in out


@pytest.mark.skipif(fake(), reason="a CPU raises an error of its own")
def test_an_index_out_of_range_ends_the_run_with_its_words(jobs, tmp_path):
    (tmp_path / "own.py").write_text(WRONG)
    flags = (f"--model={tmp_path}/own.py:Wrong", "--no-tensorboard", f"--run-dir={tmp_path}/run")
    job = begin(jobs, "train_ddp.py", *flags)
    assert job.wait() not in (0, -9), job.output
    assert "device-side assert" in events(tmp_path / "run", "error")[0]["why"]


def test_a_forked_worker_trains_on_the_gpu_and_so_does_the_one_after_it(jobs, tmp_path):
    """A fork server forks it: it must be able to use the GPU, or launch/ cannot fork workers."""
    job = begin(jobs, "train_ddp.py", f"--run-dir={tmp_path}", "--epochs=99999", "--no-tensorboard", world=1)
    assert jobs.kill(pids(tmp_path)[0])
    pids(tmp_path, 1)
    job.kill(signal.SIGTERM)
    assert "devices cuda:0" in end(job, 143) or fake()
