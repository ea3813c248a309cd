"""Data of files and a user's own, from the first sample to the digest: kills and other worlds lose nothing.

Whole scripts run in forked ranks, as in test_bitwise.py.
"""

import io
import tarfile

import pytest
from jobs import CLEAN, audit, lives
from test_bitwise import run, through_kills
from test_datasets import write_images, write_tokens

OWN = """
import tarfile
import torch
from torch.utils.data import Dataset

class Tar(Dataset):
    classes = 2
    def __init__(self, path):
        self.path = path
        with tarfile.open(path) as shard:
            self.places = {m.name: (m.offset_data, m.size) for m in shard if m.isfile()}
        self.names = sorted(name for name in self.places if name.endswith(".bin"))
    def __len__(self): return len(self.names)
    def read(self, name):
        with open(self.path, "rb") as file:
            file.seek(self.places[name][0])
            return file.read(self.places[name][1])
    def __getitem__(self, i):
        label = int(self.read(self.names[i].replace(".bin", ".cls")))
        return torch.tensor(list(self.read(self.names[i]))) / 255, label

def tar(opts): return Tar(opts.data_dir + "/train.tar"), Tar(opts.data_dir + "/val.tar")
"""


def tokens(folder):
    write_tokens(folder / "data", train=2500, val=200, vocab=30)
    return {
        "model": "gpt:1x2x16",
        "dataset": "tokens:16",
        "data_dir": f"{folder}/data",
        "epochs": 2,
        "vocab_size": 30,
    }


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
        "data_dir": f"{folder}/data",
        "epochs": 2,
        "image_size": 16,
        "workers": 1,
    }


def tar(folder):
    (folder / "data").mkdir()
    for name, count in (("train", 150), ("val", 20)):
        with tarfile.open(folder / f"data/{name}.tar", "w") as shard:
            for k in range(count):
                bits = bytes((k + j) % 256 for j in range(6))
                for kind, content in (("bin", bits), ("cls", b"%d" % (k % 2))):
                    entry = tarfile.TarInfo(f"{k:05}.{kind}")
                    entry.size = len(content)
                    shard.addfile(entry, io.BytesIO(content))
    (folder / "mine.py").write_text(OWN)
    dataset = f"{folder}/mine.py:tar"
    return {"model": "mlp", "dataset": dataset, "data_dir": f"{folder}/data", "epochs": 2, "workers": 0}


@pytest.mark.parametrize("make", [tokens, pictures, tar])
def test_a_kill_and_another_world_leave_no_trace(tmp_path, make):
    given = make(tmp_path) | {"virtual_ranks": 4, "global_batch_size": 20, "audit": True}
    unbroken = run(tmp_path / "unbroken", 1, given)
    killed = through_kills(tmp_path / "killed", given, [(2, 1, 4, "within"), (4, 0, 8, "before")], 3)
    assert killed == unbroken
    for name, worlds in (("unbroken", [1]), ("killed", [2, 4, 3])):
        assert audit(tmp_path / name) == CLEAN
        assert [event["world"] for event in lives(tmp_path / name)] == worlds
