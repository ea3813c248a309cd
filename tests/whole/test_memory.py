"""A net whose weights and optimizer do not fit in one process trains over several; what does not says so."""

import pytest
from jobs import TESTS

# Of 29.9 million parameters, 120 MB: weights, gradients, Adam's two averages and the image of a checkpoint
# are 7 times that, 840 MB, divided by the number of stages; buffers, activations and threads are some
# 150 MB more in each process.
FLAGS = (
    f"--model={TESTS}/nets.py:rationed",
    "--dataset=text:16",
    "--global-batch-size=8",
    "--micro-batch-size=1",
    "--max-steps=1",
    "--log-every=1",
    "--eval-every=0",
    "--no-tensorboard",
    "--hang-timeout=60",
)


@pytest.fixture
def flags(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 20)
    return (*FLAGS, f"--data-dir={path}", f"--run-dir={tmp_path / 'run'}")


def assert_too_little(job):
    """An agent may try again."""
    assert "allocate memory" in job.ends_with(1)


@pytest.mark.parametrize("stages, room", [(2, 700), pytest.param(4, 450, marks=pytest.mark.long)])
def test_a_gpt_that_does_not_fit_in_half_as_many_stages_trains(jobs, flags, tmp_path, stages, room):
    few = [stages // 2, "train_mp.py", "--stages=0"] if stages > 2 else [1, "train_ddp.py"]
    assert_too_little(jobs.torchrun(*few, *flags, restarts=0, ROOM=f"{room}"))
    flags = (*flags, f"--run-dir={tmp_path / 'cut'}")
    job = jobs.torchrun(stages, "train_mp.py", *flags, restarts=0, ROOM=f"{room}")
    assert "step 1/1" in job.ends_with(0)
