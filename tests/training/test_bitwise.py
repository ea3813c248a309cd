"""--virtual-ranks: one digest over weights, optimizer and buffers at any world size, through kills and
resizes.

Whole scripts run in forked ranks: data, store, rescue, log and evaluation are those of a run by hand. The
long form (`pytest -m long`) takes 200 steps and more, and all worlds.
"""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import lives, rows
from ranks import fork_ranks
from refusals import refusal
from samples import ALONE, Facts, Samples, Steps, share_of

import common.elastic as house
import train_ddp
import train_mp
from common.errors import guarded
from common.extras.bits import Slices
from common.extras.fp16 import Scaler
from common.extras.rules import check_world
from common.models import build_model
from common.options import Options
from common.sealed import sealed
from common.world import world as pinned

NETS = Path(__file__).parents[1] / "tools/nets.py"
CNN = {
    "model": f"{NETS}:cnn",
    "dataset": f"{NETS}:pictures",
    "global_batch_size": 24,
    "optimizer": "adamw",
    "weight_decay": 0.05,
    "ema_decay": 0.9,
    "clip_grad_norm": 1.0,
    "lr_schedule": "cosine",
    "label_smoothing": 0.1,
}
GPT = {
    "model": f"{NETS}:gpt",
    "dataset": f"{NETS}:words",
    "global_batch_size": 20,
    "optimizer": "adamw",
    "weight_decay": 0.1,
}
LSTM = {
    "model": "lstm",
    "dataset": f"{NETS}:sentences",
    "global_batch_size": 27,
    "clip_grad_norm": 1.0,
    "max_steps": 12,
}
RESNET = {
    "model": "resnet18",
    "dataset": f"{NETS}:colours",
    "global_batch_size": 24,
    "optimizer": "sgd",
    "max_steps": 2,
}
STEPS = 5  # an epoch of pictures: 24, 24, 24, 24 and a ragged 11 samples


def life(world, script, opts, kill=None):
    """A rank's life in a script, from its options to its end; `kill`, (rank, step, phase): SIGKILL there."""
    world = replace(world, devices=tuple(map(torch.device, opts.devices)) or world.devices)
    house.join = lambda opts, placed: (pinned.pin(opts), world)[1]
    house.leave = lambda world: None  # fork_ranks ends them together
    torch.manual_seed(os.getpid())  # nothing may depend on the generator a process happens to have
    if kill and kill[0] == world.rank:
        die_at(script, *kill[1:])
    try:
        with guarded(debug=opts.debug):
            script.main(opts)
    except SystemExit as end:
        return end.code


def die_at(script, step, phase):
    def die(state):
        if state.progress.step + 1 == step:
            signal.raise_signal(signal.SIGKILL)

    run = house.Elastic
    pieces = run._pieces
    update = run.step

    def begin(self, batch):
        if phase == "before":
            die(self.state)
        if phase == "within" and self.world.size > 1:
            self.net.register_forward_hook(lambda *_: die(self.state))
        return pieces(self, batch)

    def add(self, *loss):
        update(self, *loss)
        if phase == "after" and self.gradient.is_last and self.progress.step == step:
            signal.raise_signal(signal.SIGKILL)  # the step is counted, and in no checkpoint

    run._pieces = begin
    run.step = add


def options(folder, given):
    return Options(
        **{
            "run_dir": folder,
            "virtual_ranks": 8,
            "epochs": 6,
            "log_every": 1,
            "tensorboard": False,
            "keep": 2,
            "save_every": 4,
            "device": "cpu",
            "check_every": 5,
            "hang_timeout": 60,
        }
        | given
    )


def run(folder, world, given, script=train_ddp, kill=None):
    """Train until the end, or until the kill; returns what a run leaves behind that its bits decide."""
    may_die = range(world) if kill else ()
    fork_ranks(world, life, script, options(folder, given), kill, may_die=may_die, deadline=600)
    return None if kill else left_by(folder)


def left_by(folder):
    newest = max((folder / "checkpoints").glob("step-*"))
    # A record that its writer's death had swallowed comes back from a checkpoint, with its names in another
    # order.
    metrics = "\n".join(json.dumps(row | {"time": 0}, sort_keys=True) for row in rows(folder))
    return json.loads((newest / "manifest.json").read_text())["digest"], metrics


def one_digest(tmp_path, given, worlds):
    found = {world: run(tmp_path / f"w{world}", world, given) for world in worlds}
    assert len({digest for digest, _ in found.values()}) == 1, {
        world: digest[:12] for world, (digest, _) in found.items()
    }
    assert len(set(found.values())) == 1, (
        "losses, hits and evaluations of every step are equal to the last digit"
    )
    return found[worlds[0]]


# ---- any world ------------------------------------------------------------------------------------
ANY_WORLD = {
    "batch norm, dropout, adamw, averages, clipping": (CNN | {"epochs": 3}, (1, 2, 3, 5, 8)),
    "tied weights and unused parameters": (GPT | {"epochs": 2}, (1, 3, 8)),
    "an lstm over ragged batches": (LSTM | {"global_batch_size": 1500, "epochs": 2}, (1, 2, 5)),
    "resnet18": (RESNET, (1, 3)),
    "slices that are no power of two": (CNN | {"virtual_ranks": 7, "epochs": 2}, (1, 2, 3, 7)),
    "bf16 and channels last": (CNN | {"epochs": 2, "amp": "bf16", "channels_last": True}, (1, 3)),
    "two threads": (CNN | {"epochs": 1, "threads": 2}, (1, 3)),
}


@pytest.mark.parametrize("case", ANY_WORLD)
def test_weights_and_metrics_are_the_same_at_any_world(tmp_path, case):
    given, worlds = ANY_WORLD[case]
    if case == "resnet18":
        pytest.importorskip("torchvision")  # here, once, and not in each rank
    _, metrics = one_digest(tmp_path, given, worlds)
    if "batch norm" in case:
        assert len(metrics.splitlines()) == 3 * STEPS + 3, "every step logged, every epoch evaluated"


def test_train_mp_ends_in_the_digest_of_train_ddp_and_takes_over_from_it(tmp_path):
    given = CNN | {"epochs": 2}
    mp = {"script": "mp", "devices": ("cpu", "cpu")}
    ddp = run(tmp_path / "ddp", 3, given)
    assert run(tmp_path / "mp", 1, given | mp, train_mp) == ddp
    run(tmp_path / "both", 2, given | {"max_steps": 4})
    both = run(tmp_path / "both", 1, given | mp, train_mp)
    assert both[0] == ddp[0]


def test_plain_mode_gives_other_bits_at_other_worlds_so_this_check_can_fail(tmp_path):
    plain = CNN | {"virtual_ranks": 0, "epochs": 1}
    assert run(tmp_path / "w1", 1, plain)[0] != run(tmp_path / "w2", 2, plain)[0]
    assert run(tmp_path / "again", 2, plain)[0] == run(tmp_path / "w2b", 2, plain)[0], (
        "but equal runs are equal"
    )


# ---- through kills and resizes --------------------------------------------------------------------
def through_kills(folder, given, kills, last_world):
    """Lives of (world, rank, step, phase), each ended by a SIGKILL; then one that ends the run."""
    for world, *kill in kills:
        run(folder, world, given, kill=kill)
        assert (folder / "checkpoints").exists()
    return run(folder, last_world, given)


def test_kills_and_resizes_leave_no_trace_in_the_bits(tmp_path):
    unbroken = run(tmp_path / "unbroken", 2, CNN)
    kills = [
        (3, 1, 3, "before"),
        (2, 0, 8, "within"),
        (1, 0, 10, "after"),
        (5, 4, 14, "after"),
        (8, 0, 21, "within"),
        (2, 1, 29, "before"),
    ]
    assert through_kills(tmp_path / "killed", CNN, kills, 4) == unbroken
    assert [life["world"] for life in lives(tmp_path / "killed")] == [3, 2, 1, 5, 8, 2, 4]


# ---- what is pinned, and who is refused -----------------------------------------------------------
def test_another_thread_count_is_refused_and_another_build_is_said(tmp_path, capfd):
    more = CNN | {"epochs": 1, "max_steps": 3}
    run(tmp_path / "run", 1, more | {"max_steps": 2})
    path = tmp_path / "run/options.json"
    text = json.loads(path.read_text())
    text["pinned"]["build of torch"] = "2.0.1"
    path.write_bytes(sealed({name: value for name, value in text.items() if name != "seal"}))
    threads = options(tmp_path / "run", more | {"threads": 2})
    assert fork_ranks(1, life, train_ddp, threads, may_die=[0]) == [2]
    assert "CPU threads per process was 1, now 2" in capfd.readouterr().err
    without = options(tmp_path / "run", more | {"virtual_ranks": 0})
    assert fork_ranks(1, life, train_ddp, without, may_die=[0]) == [2]
    assert "is another run: --virtual-ranks was 8, now 0\n" in capfd.readouterr().err
    run(tmp_path / "run", 1, more)
    assert "build of torch was 2.0.1" in "".join(capfd.readouterr())


def test_more_processes_than_slices_are_refused():
    with refusal("WORLD_SIZE=3 is more than --virtual-ranks 2"):
        check_world(Options(virtual_ranks=2), 3)


# ---- parts ----------------------------------------------------------------------------------------
def small(world, virtual_ranks):
    """Steps of a net of the tests, without a script around them."""
    opts = options(Path("unused"), CNN | {"virtual_ranks": virtual_ranks})
    pinned.pin(opts)
    data = Facts("pictures", 4, (1, 12, 12))
    return Steps(build_model(opts, data), opts, world, split=pictures_of_one(), samples=107)


def pictures_of_one():
    return Samples(torch.zeros(1, 1, 12, 12), torch.zeros(1, dtype=torch.int64))


def batch_at(world, step, slices, size=24):
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(size, 1, 12, 12, generator=draws)
    y = torch.randint(4, (size,), generator=draws)
    return share_of(x, y, Options(virtual_ranks=slices), world.rank, world.size)


def test_a_rank_without_a_slice_has_the_scale_of_fp16_too():
    def scaled(world):
        steps = small(world, 3)
        state = steps.state
        state.opts = replace(state.opts, clip_grad_norm=0.0)
        state.scaler = Scaler("cpu", init_scale=1024.0)
        steps.step(batch_at(world, 0, 3, size=1))
        return state.progress.step

    assert fork_ranks(3, scaled) == [1, 1, 1]


def test_a_gradient_of_minus_zero_is_a_gradient_and_a_weight_without_one_has_none():
    def signs(world):
        net = torch.nn.ParameterDict({"used": torch.ones(2), "unused": torch.ones(2), "w": torch.ones(2)})
        steps = Steps(net, Options(virtual_ranks=4), world)
        (slices,) = steps.gradient.args
        slices.begin(steps.state, torch.zeros(2), True)
        for v in slices.own:
            loss = net["w"].sum() - 0.0 * net["used"].sum() * (v == 2)
            slices.add(v, 0.25, torch.zeros(2), loss)
        slices.finish()
        return [name for name, p in net.items() if p.grad is None]

    assert fork_ranks(2, signs) == [["unused"]] * 2


def test_buffers_that_are_not_finite_stay_as_they_are_in_both_modes():
    def infinite(world, virtual_ranks):
        steps = small(world, virtual_ranks)
        state = steps.state
        steps.step(batch_at(world, 0, virtual_ranks))
        counted = [int(b) for n, b in state.statistics.committed.items() if n.endswith("num_batches_tracked")]
        return state.statistics.committed["0.infinite"].tolist(), counted

    for virtual_ranks in (0, 8):
        assert fork_ranks(2, infinite, virtual_ranks) == [([float("-inf"), 1.0], [1])] * 2


def test_buckets_are_sent_in_one_order_whichever_thread_of_autograd_fills_them():
    """With a net over several devices autograd has a thread a device: in another order sums are swapped."""
    order = []

    class Noted:
        def __init__(self, name, weight):
            self.name = name
            self.members = [weight]

        def collect(self, carries):
            if self.name == "A":  # while it is added up, the other device is ready
                other.start()
                other.join(0.2)

        def send(self):
            order.append(self.name)

    net = torch.nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    slices = Slices(net, ALONE, 1)
    buckets = [Noted("A", net.weight), Noted("B", net.bias)]
    slices.filling = [*buckets]
    slices.waiting = {net.weight, net.bias}
    slices.next = 0
    other = threading.Thread(target=slices._ready, args=(net.bias,))
    slices._ready(net.weight)
    other.join()
    assert order == ["A", "B"]
