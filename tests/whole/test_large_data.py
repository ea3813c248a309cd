"""Data of files, from the first sample to the digest: kills and other worlds lose nothing.

Whole scripts run in forked ranks, as in test_bitwise.py.
"""

import pytest
from jobs import CLEAN, audit, lives
from test_bitwise import run, through_kills
from test_datasets import write_images, write_tokens


def tokens(folder):
    write_tokens(folder / "data", train=2500, val=200, vocab=30)
    return {"model": "gpt:1x2x16", "dataset": "tokens:16", "vocab_size": 30}


def pictures(folder):
    pytest.importorskip("torchvision")  # here, once, and not in each rank
    write_images(folder / "data", n=50)
    (folder / "net.py").write_text(
        "from torch import nn\ndef small(data):\n return nn.Sequential("
        "nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, data.classes))\n"
    )
    return {
        "model": f"{folder}/net.py:small",
        "dataset": "imagefolder",
        "image_size": 16,
        "workers": 1,
    }


@pytest.mark.parametrize("make", [tokens, pictures])
def test_a_kill_and_another_world_leave_no_trace(tmp_path, make):
    given = make(tmp_path) | {"data_dir": f"{tmp_path}/data", "epochs": 2}
    given |= {"virtual_ranks": 4, "global_batch_size": 20, "audit": True}
    unbroken = run(tmp_path / "unbroken", 1, given)
    killed = through_kills(tmp_path / "killed", given, [(2, 1, 4, "within"), (4, 0, 8, "before")], 3)
    assert killed == unbroken
    for name, worlds in (("unbroken", [1]), ("killed", [2, 4, 3])):
        assert audit(tmp_path / name) == CLEAN
        assert [event["world"] for event in lives(tmp_path / name)] == worlds
