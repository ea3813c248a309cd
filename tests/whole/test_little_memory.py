"""A net whose weights and optimizer do not fit into a process says so, in torch's own words."""

from jobs import TESTS

# Of 29.9 million parameters, 120 MB: weights, gradients, Adam's two averages and the image of a checkpoint
# are 7 times that, 840 MB; buffers, activations and threads are some 150 MB more.
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


def test_a_gpt_that_does_not_fit_into_a_process_says_so(jobs, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 20)
    flags = (*FLAGS, f"--data-dir={path}", f"--run-dir={tmp_path / 'run'}")
    job = jobs.torchrun(1, "train_ddp.py", *flags, restarts=0, ROOM="700")
    assert "allocate memory" in job.ends_with(1)  # an agent may try again
