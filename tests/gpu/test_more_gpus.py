"""What several GPUs of one machine add, over NCCL. Each test is skipped where fewer are visible."""

import os
import random
import signal
import sys
import time

import pytest
from gpus import SMALL, TEXT, begin, devices, fake, needs, pids, seen, train
from jobs import ROOT, audit, digest, losses

NETS = ROOT / "tests/tools/nets.py"
DROPOUT = (f"--model={NETS}:cnn", f"--dataset={NETS}:pictures")
LONG = ("--epochs=1000", "--no-tensorboard", "--audit", "--save-every=0", "--save-seconds=0", "--log-every=1")


def loses_nothing(job, run, *signals):
    """Each life loses a process at a random moment; then the job is asked to stop."""
    for life, number in enumerate(signals):
        victim = pids(run, life)[life % 2]
        time.sleep(random.random())  # the moment is what is tried
        os.kill(victim, number)
    pids(run, len(signals))
    job.kill(signal.SIGTERM)
    job.wait()
    found = audit(run)
    assert found["missed"] == found["repeated"] == found["lost"] == 0


@needs(2)
def test_a_kill_of_a_rank_loses_no_step_and_one_that_stands_still_ends_at_the_limit(jobs, tmp_path):
    job = begin(jobs, "train_ddp.py", f"--run-dir={tmp_path}", *LONG, "--hang-timeout=5", world=2)
    loses_nothing(job, tmp_path, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)


@needs(2)
@pytest.mark.parametrize(
    "flags, chosen",
    [
        (("--virtual-ranks=7",), "ranks devices"),
        (("--virtual-ranks=8", "--model=resnet18"), "ranks"),  # no nn.Sequential: it is not cut
        (("--virtual-ranks=8", *TEXT), "ranks devices"),
        (("--virtual-ranks=8", *DROPOUT), "ranks devices"),  # a generator for each device
        pytest.param(("--virtual-ranks=8", *DROPOUT), "both", marks=needs(4)),
    ],
)
def test_the_digest_is_that_of_one_gpu_with_ranks_and_with_a_net_over_devices(jobs, tmp_path, flags, chosen):
    train(jobs, tmp_path / "1", "train_ddp.py", *SMALL, *flags)
    ways = {
        "ranks": ("train_ddp.py", {"world": 2}),
        "devices": ("train_mp.py", {}),
        "both": ("train_mp.py", {"world": 2, "gpus": 4}),
    }
    for name in chosen.split():
        script, how = ways[name]
        more = () if how else (devices(0, 1),)
        train(jobs, tmp_path / name, script, *SMALL, *flags, *more, **how)
    assert len({digest(tmp_path / name) for name in ("1", *chosen.split())}) == 1


@needs(2)
def test_a_net_over_two_gpus_has_the_losses_of_one_gpu_with_forwards_in_flight(jobs, tmp_path):
    flags = (*SMALL, *TEXT, "--micro-batch-size=4", "--log-every=1")
    train(jobs, tmp_path / "1", "train_ddp.py", *flags)
    train(jobs, tmp_path / "2", "train_mp.py", devices(0, 1), *flags)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-3)


@needs(2)
@pytest.mark.skipif(fake(), reason="fp16 needs GPUs")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_overflows_on_two_gpus_is_skipped_on_both(jobs, tmp_path, optimizer):
    """The first scale of fp16 is too large: each run begins with skipped steps."""
    flags = ("--amp=fp16", f"--optimizer={optimizer}", "--log-every=1", *SMALL)
    train(jobs, tmp_path / "2", "train_mp.py", devices(0, 1), *flags)
    found = losses(tmp_path / "2")
    assert found[-1] < found[0], "nothing is nan"


@needs(4)
@pytest.mark.parametrize("flags", [("--virtual-ranks=8",), ("--micro-batch-size=8",)])
def test_two_processes_with_two_gpus_each_meet_and_a_kill_of_one_loses_no_step(jobs, tmp_path, flags):
    """The placement (0, 1), (2, 3), in which NCCL has hung (pytorch#25767): one communicator a device."""
    job = begin(jobs, "train_mp.py", f"--run-dir={tmp_path}", *LONG, *TEXT, *flags, world=2, gpus=4)
    loses_nothing(job, tmp_path, *[signal.SIGKILL] * 3)


@needs(1)
@pytest.mark.skipif(not fake() and tuple(seen()[1]) < (2, 30), reason="several ranks on a GPU: NCCL 2.30")
def test_two_ranks_on_one_gpu_lose_no_step_when_one_is_killed(jobs, tmp_path):
    own = tmp_path / "own.sh"
    own.write_text(
        "export GROUP_RANK=$LOCAL_RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1\n"
        f'exec {sys.executable} {ROOT}/train_ddp.py "$@"\n'
    )
    agent = ("torch.distributed.run", "--nproc_per_node=2", "--max_restarts=5", "--no_python", "bash", own)
    run = tmp_path / "run"
    how = {"gpus": 1, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    loses_nothing(begin(jobs, "-m", *agent, f"--run-dir={run}", *LONG, **how), run, signal.SIGKILL)
