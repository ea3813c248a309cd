"""A process that a fork server forks: it must be able to use the GPU, or launch/ cannot fork workers."""

from gpus import fake, needs, visible
from jobs import ROOT, events, lives, until

pytestmark = needs(1)


def test_a_worker_trains_on_the_gpu_and_so_does_the_one_after_it(jobs, tmp_path):
    run = tmp_path / "run"
    job = jobs.start(
        ROOT / "launch/torchrun.py",
        "--nproc_per_node=1",
        "--start_method=forkserver",
        ROOT / "train_ddp.py",
        "--dataset=random",
        "--model=mlp",
        f"--device={'cpu' if fake() else 'cuda'}",
        "--epochs=99999",
        "--no-tensorboard",
        f"--run-dir={run}",
        cold=True,
        CUDA_VISIBLE_DEVICES=visible(1),
    )
    for life in (1, 2):
        until(
            lambda life=life: job.poll() is not None or len(events(run, "first_step")) >= life,
            f"the first step of life {life}",
        )
        assert job.poll() is None and ("devices cuda:0" in job.output or fake()), job.output
        if life == 1:
            assert jobs.kill(lives(run)[-1]["pids"][0])
    job.kill(15)
    assert job.wait() == 143, job.output
