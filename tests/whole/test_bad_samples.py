"""What a person is told when a sample or a loss is bad, and that what he is told works: the commands, typed
as they stand.
"""

import re
import shlex

from jobs import CLEAN, PACED, audit, lives, steps_on_disk
from test_datasets import write_images

from common.sampler import permute


def test_a_bad_picture_stops_the_run_saved_and_once_it_is_mended_the_same_command_goes_on(
    jobs, run, tmp_path
):
    """Eight to train on in four steps; the fifth in the order of the first epoch is cut short."""
    files = sorted((write_images(tmp_path / "pictures", n=4) / "train").rglob("*.png"))
    bad = files[int(permute(range(4, 5), 8, 0, 0))]
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    flags = "--dataset=imagefolder --data-dir=pictures --image-size=8 --model=mlp --epochs=1 --audit".split()
    start = ["train_ddp.py", *flags, "--global-batch-size=2", "--no-tensorboard", "--run-dir=run"]
    said = jobs.python(*start, "--workers=2", cwd=tmp_path).ends_with(2)
    assert f"{bad.name} is not an image" in said and "--bad-samples skip" in said, said
    assert steps_on_disk(run) == [2]
    bad.write_bytes(whole)
    assert "--accept-data-change" in jobs.python(*start, cwd=tmp_path).ends_with(2)
    said = jobs.python(*start, "--accept-data-change", cwd=tmp_path).ends_with(0)
    assert "resuming at step 2, epoch 1, position 4" in said, said
    assert audit(run) == CLEAN and len(lives(run)) == 2


def test_after_a_loss_that_is_no_number_the_command_it_names_begins_another_run_there(jobs, tmp_path, run):
    flags = [*PACED, "--optimizer=sgd", "--save-every=1"]
    # a save has its time
    job = jobs.python("train_ddp.py", *flags, f"--run-dir={run}", "--lr=1e308", PACE="0.2")
    command = re.search("--run-dir NEW.*", job.ends_with(5))[0]
    words = command.replace("NEW", f"{tmp_path}/new").replace("X", "0.001")
    job = jobs.python("train_ddp.py", *flags, *shlex.split(words), PACE="0")
    job.wait()  # with any code: what was saved at such a rate may be useless
    assert "resuming at step 1" in job.output, job.output
