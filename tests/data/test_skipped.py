"""--bad-samples skip: what cannot be read counts 0 in loss, mean and metrics; the order does not move."""

from jobs import CLEAN, audit, events
from refusals import refusal
from test_bitwise import run, through_kills

from common.data import load_data
from common.options import Options

BAD = {3, 57, 70, 77, *range(90, 97)}  # ids
ROWS = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Rows(Dataset):
    classes, bad = 3, {bad}
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i in self.bad:
            raise ValueError(f"row {{i}} is torn")
        x = torch.rand(6, generator=torch.Generator().manual_seed(i))
        return x, int(3 * x[0])

def data(): return Rows(100), Rows(20)
def pairs(data): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
def plain(data): return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
"""


def flags(folder, bad=BAD, net="plain", **more):
    (folder / "mine.py").write_text(ROWS.format(bad=bad))
    place = f"{folder}/mine.py"
    given = {"model": f"{place}:{net}", "dataset": f"{place}:data", "bad_samples": "skip", "workers": 0}
    return given | {"global_batch_size": 20, "device": "cpu", "log_every": 1, "audit": True} | more


def test_kills_and_other_worlds_leave_no_trace_though_samples_are_missing(tmp_path):
    given = flags(tmp_path, net="pairs", workers=2, virtual_ranks=4, epochs=2)
    unbroken = run(tmp_path / "unbroken", 1, given)
    kills = [(2, 1, 3, "within"), (4, 0, 7, "before")]
    assert through_kills(tmp_path / "killed", given, kills, 3) == unbroken
    for name in ("unbroken", "killed"):
        assert audit(tmp_path / name) == CLEAN
        noted = {event["id"]: event["why"] for event in events(tmp_path / name, "bad_sample")}
        assert set(noted) == BAD and noted[57].endswith("row 57 is torn")


def test_a_slice_or_a_share_of_bad_samples_alone_is_one_without_samples(tmp_path):
    given = flags(tmp_path, bad=set(range(7, 100)), global_batch_size=4, epochs=1)
    sliced = given | {"virtual_ranks": 4, "cross_check": 1}
    assert run(tmp_path / "a", 4, sliced) == run(tmp_path / "b", 1, sliced)
    run(tmp_path / "c", 3, given)
    assert audit(tmp_path / "c") == CLEAN


def test_a_dataset_of_bad_samples_alone_is_refused(tmp_path):
    with refusal("none of its 100 samples"):
        load_data(Options(**flags(tmp_path, bad="range(1000)")))
