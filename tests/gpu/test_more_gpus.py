"""What several GPUs of one machine add, over NCCL. Each test is skipped where fewer are visible."""
import os
import random
import signal
import time

import pytest
from gpus import CHECKS, ROOT, begin, devices, digest, end, fake, losses, needs, seen, train
from jobs import audit, children, events, lives, until

SMALL = ("--epochs=1", "--max-steps=40")
GPT = ("--model=gpt", "--dataset=text:64", f"--data-dir={ROOT / 'README.md'}")
LONG = ("--epochs=1000", "--no-tensorboard", "--audit", "--save-every=0", "--save-seconds=0", "--log-every=1")


def pids(run, life=0):
    until(lambda: len(lives(run)) > life and len(events(run, "first_step")) > life, f"life {life}", 300)
    return lives(run)[life]["pids"]


def stopped(job, deadline=60):
    job.terminate()
    job.communicate(timeout=deadline)


@needs(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_of_a_rank_loses_no_step(tmp_path, rank):
    job = begin("train_ddp.py", f"--run-dir={tmp_path}", *LONG, world=2)
    for life in range(3):
        victim = pids(tmp_path, life)[rank]
        time.sleep(random.random())  # the moment is what is tried
        os.kill(victim, signal.SIGKILL)
    pids(tmp_path, 3)
    stopped(job)
    found = audit(tmp_path)
    assert found["missed"] == found["repeated"] == found["lost"] == 0


@needs(2)
def test_a_stop_of_all_takes_seconds(tmp_path):
    job = begin("train_ddp.py", f"--run-dir={tmp_path}", *LONG, world=2)
    pids(tmp_path)
    asked = time.monotonic()
    stopped(job)
    assert time.monotonic() - asked < 5 and not children(job.pid)
    assert list(tmp_path.glob("checkpoints/step-*"))


@needs(2)
def test_a_rank_that_stands_still_is_named_and_the_others_go_on(tmp_path):
    job = begin("train_ddp.py", f"--run-dir={tmp_path}", *LONG, "--hang-timeout=5", world=2)
    os.kill(pids(tmp_path)[1], signal.SIGSTOP)
    pids(tmp_path, 1)
    stopped(job)
    assert audit(tmp_path)["lost"] == 0


@needs(2)
@pytest.mark.parametrize("flags", [("--virtual-ranks=8",), ("--virtual-ranks=7",),
                                   ("--virtual-ranks=8", "--model=resnet18"), ("--virtual-ranks=8", *GPT)])
def test_the_digest_is_that_of_one_gpu_with_ranks_and_with_stages(tmp_path, flags):
    train(tmp_path / "1", "train_ddp.py", *SMALL, *flags)
    ways = {"ranks": ("train_ddp.py", 2, ()), "stages": ("train_mp.py", 2, ()),
            "devices": ("train_mp.py", 0, (devices(0, 1),))}
    for name, (script, world, more) in ways.items():
        train(tmp_path / name, script, *SMALL, *flags, *more, world=world)
    assert len({digest(tmp_path / name) for name in ("1", *ways)}) == 1


@needs(2)
@pytest.mark.parametrize("flags", [("--recompute",), ("--freeze=embedding", "--clip-grad-norm=1")])
def test_stages_over_gpus_have_the_loss_of_the_whole_net(tmp_path, flags):
    both = (*SMALL, *GPT, "--log-every=1", "--micro-batch-size=8", *flags)
    train(tmp_path / "1", "train_ddp.py", *[flag for flag in both if flag != "--recompute"])
    train(tmp_path / "ranks", "train_mp.py", *both, world=2)
    train(tmp_path / "devices", "train_mp.py", *both, devices(0, 1))
    for name in ("ranks", "devices"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "1"), abs=1e-3)


@needs(2)
@pytest.mark.skipif(fake(), reason="--amp fp16 and --sync-bn work on GPUs only")
def test_an_overflow_over_two_gpus_is_skipped_and_ragged_shares_of_a_sync_batchnorm_do_not_hang(tmp_path):
    train(tmp_path / "fp16", "train_mp.py", *SMALL, *GPT, "--amp=fp16", devices(0, 1), "--micro-batch-size=8",
          "--log-every=1")
    assert all(loss == loss for loss in losses(tmp_path / "fp16")[5:]), "nan"
    train(tmp_path / "sync", "train_ddp.py", "--model=resnet18", "--sync-bn", "--micro-batch-size=16",
          "--global-batch-size=33", "--max-steps=5", world=2)


@needs(2)
@pytest.mark.skipif(fake(), reason="CPUs have no replicas in threads")
def test_replicas_of_one_process_compute_in_bfloat16_and_refuse_to_be_compiled(tmp_path):
    assert end(begin(CHECKS, "dp_dtype")).split()[-2:] == ["torch.bfloat16"] * 2
    out = train(tmp_path, "train_dp.py", "--compile", devices(0, 1), code=2)
    assert "--compile: train_dp.py copies" in out


@needs(2)
@pytest.mark.skipif(fake(), reason="CPUs have no share of a GPU's memory")
def test_a_sharded_stage_holds_its_share_of_the_memory(tmp_path):
    flags = (*GPT, "--model=gpt:24x16x1024", "--max-steps=3", "--log-every=1", "--micro-batch-size=2")
    found = []
    for name, more in (("shard", ("--stages=1", "--shard")), ("whole", ("--stages=1",))):
        train(tmp_path / name, "train_mp.py", *flags, *more, world=2)
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append(max(float(row.split('"MiB_0": ')[1].split(",")[0].rstrip("}")) for row in rows
                         if "MiB_0" in row))
    assert found[0] < 0.65 * found[1], found


@needs(2)
@pytest.mark.skipif(fake(), reason="CPUs have no kernels beside each other")
def test_the_exchange_of_gradients_runs_beside_the_backward():
    lines = end(begin("tests/bench/gpu.py", "--overlap", "--steps=5")).splitlines()
    assert max(int(line.split(" a step, ")[1].split("%")[0]) for line in lines if " a step, " in line) > 20


@needs(2)
def test_the_launcher_counts_the_gpus_that_are_visible(tmp_path):
    call = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    end(begin("-c", call, "launch/local.sh", *SMALL, f"--run-dir={tmp_path}", "--no-tensorboard", gpus=1))
    assert lives(tmp_path)[0]["world"] == 1 or fake()


@needs(1)
@pytest.mark.skipif(not fake() and tuple(seen()[1]) < (2, 30), reason="several ranks on a GPU: NCCL 2.30")
def test_two_ranks_on_one_gpu_lose_no_step_when_one_is_killed(tmp_path):
    own = tmp_path / "own.sh"
    own.write_text("export GROUP_RANK=$LOCAL_RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1\n"
                   'exec python train_ddp.py "$@"\n')
    job = begin("-m", "torch.distributed.run", "--nproc_per_node=2", "--max_restarts=5", "--no_python",
                "bash", own, f"--run-dir={tmp_path / 'run'}", *LONG, gpus=1, NCCL_MULTI_RANK_GPU_ENABLE="1")
    os.kill(pids(tmp_path / "run")[1], signal.SIGKILL)
    pids(tmp_path / "run", 1)
    stopped(job)
    assert audit(tmp_path / "run")["lost"] == 0


@needs(8)
@pytest.mark.long
def test_one_digest_at_any_number_of_gpus(tmp_path):
    found = set()
    for world in (1, 2, 3, 5, 8):
        train(tmp_path / str(world), "train_ddp.py", *SMALL, "--virtual-ranks=8", world=world, gpus=world)
        found.add(digest(tmp_path / str(world)))
    assert len(found) == 1
