"""Weights of another task, frozen layers, a user's optimizer and schedule, patience: kills leave no trace."""

import json

import torch
from jobs import CLEAN, audit, weights
from ranks import fork_ranks
from safetensors.torch import save_file
from test_bitwise import NETS, life, options, run, through_kills

import train_ddp
import train_mp

OWN = """
import torch
from torch import nn

def net(data):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 8),
                         nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, data.classes))

def optimizer(net, opts):
    groups = [{"params": net[4].parameters()}, {"params": net[7].parameters(), "scale": 2.0}]
    return torch.optim.NAdam(groups, weight_decay=opts.weight_decay)

def schedule(step, total, opts):  # from step 10 on nothing moves, and no evaluation can be better
    return (step < 10) * (1 - step / total)
"""


class Facts:
    classes = 9  # of the net whose weights are taken


def test_init_from_init_skip_freeze_and_patience_go_through_kills_and_worlds_to_one_digest(tmp_path, capfd):
    own = tmp_path / "own.py"
    file = tmp_path / "foreign.safetensors"
    own.write_text(OWN)
    exec(OWN, made := {})
    foreign = made["net"](Facts).state_dict()
    save_file(foreign, file)
    given = {
        "model": f"{own}:net",
        "dataset": f"{NETS}:pictures",
        "global_batch_size": 24,
        "virtual_ranks": 4,
        "lr": 0.02,
        "optimizer": f"{own}:optimizer",
        "lr_schedule": f"{own}:schedule",
        "weight_decay": 0.1,
        "init_from": str(file),
        "init_skip": ("7.",),
        "freeze": ("0.", "1."),
        "patience": 2,
        "audit": True,
    }
    killed = tmp_path / "killed"
    staged = given | {"script": "mp", "devices": ("cpu", "cpu")}
    unbroken = run(tmp_path / "unbroken", 1, given)
    said = capfd.readouterr().out
    assert f"from {file}" in said and "stopped: no better evaluation since step" in said
    # not rank 0 the second time: its save of the best evaluation, of step 5, may still be under way
    assert through_kills(killed, given, [(2, 0, 3, "within"), (3, 1, 8, "after")], 2) == unbroken
    assert audit(killed) == CLEAN
    last = json.loads(max((killed / "checkpoints").glob("step-*/state.json")).read_text())
    assert last["step"] - last["best"]["step"] == 2 * 5 and last["step"] < 6 * 5
    assert fork_ranks(1, life, train_ddp, options(killed, given)) == [None], "a restart finds nothing to do"
    assert run(tmp_path / "stages", 1, staged, train_mp) == unbroken
    found = weights(killed)
    same = {name for name, tensor in foreign.items() if torch.equal(found[name], tensor)}
    assert same == {name for name in foreign if name.startswith(("0.", "1."))}, "what is frozen and no more"
