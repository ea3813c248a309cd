"""What lives before it mean for the one that begins."""
import shutil

from common.rescue.life import pause_seconds


def lives(*steps, **events):
    """Lives that began at these steps; `k=event` adds an event to the k-th."""
    return [[{"event": "life", "step": step}, {"event": events.get(f"_{k}", "first_step"), "step": step + 2}]
            for k, step in enumerate(steps)]


def test_lives_that_begin_at_one_step_again_and_again_pause_longer_each_time():
    """Each makes a step or two and is killed before a save: no error, no survivor, and no end otherwise."""
    assert [pause_seconds(lives(*[7] * count), 7) for count in range(7)] == [0, 0, 0, 1, 2, 4, 8]
    assert pause_seconds(lives(*[7] * 99), 7) == 60
    assert pause_seconds(lives(7, 7, 7), 9) == pause_seconds(lives(7, 7, 5, 7, 7), 7) == 0
    assert pause_seconds(lives(7, 7, 7, 7, _2="stop"), 7) == 0


def test_a_start_that_finds_no_checkpoint_where_one_was_saved_tells_so(jobs, tmp_path):
    """Its disk may not be mounted: training would begin again without a word."""
    for steps, told in ((4, False), (4, True)):
        job = jobs.python("train_ddp.py", f"--run-dir={tmp_path}/run", "--model=mlp", "--dataset=random",
                          "--no-tensorboard", f"--max-steps={steps}")
        assert job.wait() == 0 and told == (
            "step 4 was saved, but no checkpoint is left; training begins again" in job.output), job.output
        shutil.rmtree(tmp_path / "run/checkpoints")
