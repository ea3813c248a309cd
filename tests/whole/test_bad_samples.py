"""What a person is told when a sample or a loss is bad, and that what he is told works: the commands, typed
as they stand.
"""

import re
import shlex

import pytest
from jobs import CLEAN, PACED, audit, lives, steps_on_disk
from test_datasets import write_images


@pytest.fixture
def pictures(tmp_path):
    """Eight to train on in four steps; the fifth in the order of the first epoch is cut short."""
    pytest.importorskip("torchvision")
    from common.sampler import permute

    root = write_images(tmp_path / "pictures", n=4)
    files = sorted((root / "train").rglob("*.png"))
    bad = files[int(permute(range(4, 5), 8, 0, 0))]
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(opts, data):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, data.classes))\n"
    )
    flags = [
        "train_ddp.py",
        "--dataset=imagefolder",
        f"--data-dir={root}",
        f"--model={tmp_path}/mine.py:net",
        "--epochs=1",
        "--global-batch-size=2",
        "--log-every=1",
        "--no-tensorboard",
        "--audit",
        f"--run-dir={tmp_path}/run",
    ]
    return root, bad, whole, flags


def test_a_bad_picture_stops_the_run_saved_and_once_it_is_mended_the_same_command_goes_on(
    jobs, run, pictures
):
    root, bad, whole, flags = pictures
    said = jobs.python(*flags, "--workers=2").ends_with(2)
    assert f"error: {bad} is not an image" in said and "--bad-samples skip" in said, said
    assert steps_on_disk(run) == [2]
    bad.write_bytes(whole)
    assert "--accept-data-change" in jobs.python(*flags, "--workers=0").ends_with(2)
    said = jobs.python(*flags, "--workers=0", "--accept-data-change").ends_with(0)
    assert "resuming at step 2, epoch 1, position 4" in said, said
    assert audit(run) == CLEAN and len(lives(run)) == 2


def test_a_bad_picture_that_is_removed_lets_the_epoch_begin_again(jobs, run, pictures):
    _, bad, _, flags = pictures
    assert f"error: {bad} is not an image" in jobs.python(*flags, "--workers=0").ends_with(2)
    bad.unlink()
    said = jobs.python(*flags, "--workers=0", "--accept-data-change").ends_with(0)
    assert "resuming at step 2, epoch 1, position 0" in said, said
    assert "the epoch begins again with 7 samples" in said
    assert audit(run) == CLEAN and (run / "checkpoints/step-00000006").is_dir()


@pytest.mark.parametrize("every, begins", [(0, "starting at step 0"), (1, "resuming at step 1")])
def test_after_a_loss_that_is_no_number_the_command_it_names_begins_another_run_there(
    jobs, tmp_path, run, every, begins
):
    flags = [*PACED, "--optimizer=sgd", f"--save-every={every}"]
    # a save has its time
    job = jobs.python("train_ddp.py", *flags, f"--run-dir={run}", "--lr=1e308", PACE="0.2")
    command = re.search("--run-dir NEW.*", job.ends_with(5))[0]
    words = command.replace("NEW", f"{tmp_path}/new").replace("X", "0.001")
    job = jobs.python("train_ddp.py", *flags, *shlex.split(words), PACE="0")
    job.wait()  # with any code: what was saved at such a rate may be useless
    assert begins in job.output, job.output
