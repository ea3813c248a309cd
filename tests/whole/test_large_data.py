"""Data larger than memory, from its files to the digest: two ranks, kills, other worlds, nothing lost.

Whole scripts run in forked ranks, as in test_bitwise.py.
"""
import pytest
from jobs import audit, lives
from test_bitwise import run, through_kills
from test_shards import write_shards
from test_tokens import write

CLEAN = {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
OWN = """
import torch
from torch.utils.data import Dataset

class Rows(Dataset):
    classes = 3
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        x = torch.rand(6, generator=torch.Generator().manual_seed(i))
        return x, int(3 * x[0])

def make(**facts):
    train = Rows(200)
    vars(train).update(facts)
    return train, Rows(20)

def groups(): return make(groups=[9, 30, 1] * 5)
def weights(): return make(weights=torch.arange(200) % 5)
def nothing(): return make()
def subset():
    train, test = make(weights=torch.arange(200) % 5)
    return torch.utils.data.Subset(train, range(7, 187)), test
"""


def tokens(folder):
    write(folder / "data", train=2500, val=200, vocab=30)
    return {"model": "gpt:1x2x16", "dataset": "tokens:16", "data_dir": str(folder / "data"), "epochs": 2}


def tar(folder):
    write_shards(folder / "data", count=5, size=30)
    (folder / "net.py").write_text("from torch import nn\ndef small(data):\n return nn.Sequential("
                                   "nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, data.classes))\n")
    return {"model": f"{folder}/net.py:small", "dataset": "tar", "data_dir": str(folder / "data"),
            "epochs": 2, "image_size": 16, "workers": 1}


def own(name):
    def flags(folder):
        (folder / "mine.py").write_text(OWN)
        return {"model": "mlp", "dataset": f"{folder}/mine.py:{name}", "epochs": 2, "workers": 0}
    return flags


@pytest.mark.parametrize("make", [tokens, tar, own("groups"), own("weights"), own("subset")],
                         ids=["tokens", "tar", "groups", "weights", "subset"])
def test_a_kill_and_another_world_leave_no_trace(tmp_path, make):
    given = make(tmp_path) | {"virtual_ranks": 4, "global_batch_size": 20, "audit": True}
    unbroken = run(tmp_path / "unbroken", 1, given)
    killed = through_kills(tmp_path / "killed", given, [(2, 1, 6, "within"), (4, 0, 11, "before")], 3)
    assert killed == unbroken
    for name, worlds in (("unbroken", [1]), ("killed", [2, 4, 3])):
        assert audit(tmp_path / name) == CLEAN
        assert [event["world"] for event in lives(tmp_path / name)] == worlds


def test_the_audit_knows_groups_and_weights_and_says_what_it_lacks(tmp_path):
    for kind in ("groups", "weights"):
        flags = own(kind)(tmp_path) | {"virtual_ranks": 0,
                                       "global_batch_size": 20, "audit": True, "epochs": 1}
        run(folder := tmp_path / kind, 1, flags)
        order, = (folder / "audit").glob("order-*")
        plain = (folder / "ledger.jsonl").read_text()
        (folder / "ledger.jsonl").write_text(plain.replace(order.stem[6:], ""))  # as if it had none
        found = audit(folder)
        assert found["missed"] == found["repeated"] > 100
        (folder / "ledger.jsonl").write_text(plain)
        assert audit(folder) == CLEAN
        order.unlink()
        with pytest.raises(Exception, match=order.name):
            audit(folder)


def test_other_weights_are_other_data_and_begin_the_epoch_again(tmp_path):
    flags = own("weights")(tmp_path) | {"virtual_ranks": 0, "global_batch_size": 20, "audit": True}
    run(tmp_path / "run", 1, flags | {"max_steps": 4})
    flags["accept_data_change"] = True
    path = tmp_path / "mine.py"
    path.write_text(OWN.replace("% 5", "% 4"))
    run(tmp_path / "run", 1, flags | {"epochs": 1})
    assert audit(tmp_path / "run") == CLEAN
    assert [(event["step"], event["position"]) for event in lives(tmp_path / "run")] == [(0, 0), (4, 0)]
