"""--virtual-ranks: one digest over weights, optimizer and buffers at any world size, through kills and
resizes.

Whole scripts run in forked ranks: data, store, rescue, log and evaluation are those of a run by hand. The
long form (`pytest -m long`) takes 200 steps and more, and all worlds.
"""

import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import stores
import torch
import torch.distributed as dist
from jobs import digest, lives, rows
from ranks import at_home, fork_ranks
from samples import ALONE, CPU, Facts, Samples, Steps

import common.elastic as house
import train_ddp
from common.errors import guarded
from common.extras import bits
from common.extras.bits import Slices
from common.models import build_model
from common.options import Options
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


def life(world, script, opts, kill=None):
    """A rank's life in a script, from its options to its end; `kill`, (rank, step, phase): SIGKILL there."""
    at_home(world)
    torch.manual_seed(os.getpid())  # nothing may depend on the generator a process happens to have
    if kill and kill[0] == world.rank:
        die_at(*kill[1:])
    try:
        with guarded(debug=opts.debug):
            script.main(opts)
    except SystemExit as end:
        return end.code


def die_at(step, phase):
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
    # A record that its writer's death had swallowed comes back from a checkpoint, with its names in another
    # order.
    metrics = "\n".join(json.dumps(row | {"time": 0}, sort_keys=True) for row in rows(folder))
    return digest(folder), metrics


# ---- any world ------------------------------------------------------------------------------------
GPT = {"model": f"{NETS}:gpt", "dataset": f"{NETS}:words", "global_batch_size": 20, "weight_decay": 0.1}
LSTM = {"model": "lstm", "dataset": f"{NETS}:sentences", "global_batch_size": 1500, "clip_grad_norm": 1.0}
RESNET = {"model": "resnet18", "dataset": f"{NETS}:colours", "optimizer": "sgd", "max_steps": 2}
ANY_WORLD = {
    "batch norm, dropout, adamw, averages, clipping": (CNN | {"epochs": 3}, (1, 2, 3, 5, 8)),
    "tied weights and unused parameters": (GPT | {"epochs": 2, "optimizer": "adamw"}, (1, 3, 8)),
    "an lstm over ragged batches": (LSTM | {"epochs": 2, "max_steps": 12}, (1, 2, 5)),
    "resnet18": (RESNET | {"global_batch_size": 24}, (1, 3)),
    "slices that are no power of two": (CNN | {"virtual_ranks": 7, "epochs": 2}, (1, 2, 3, 7)),
    "bf16 and channels last": (CNN | {"epochs": 2, "amp": "bf16", "channels_last": True}, (1, 3)),
}


@pytest.mark.parametrize("case", ANY_WORLD)
def test_weights_and_metrics_are_the_same_at_any_world(tmp_path, case):
    given, worlds = ANY_WORLD[case]
    if case == "resnet18":
        pytest.importorskip("torchvision")  # here, once, and not in each rank
    alone, *found = (run(tmp_path / str(world), world, given) for world in worlds)
    assert found == [alone] * len(found)


# ---- through kills and resizes --------------------------------------------------------------------
def through_kills(folder, given, kills, last_world):
    """Lives of (world, rank, step, phase), each ended by a SIGKILL; then one that ends the run."""
    for world, *kill in kills:
        run(folder, world, given, kill=kill)
        assert (folder / "checkpoints").exists()
    return run(folder, last_world, given)


def test_kills_and_resizes_leave_no_trace_in_the_bits(tmp_path):
    given = CNN | {"channels_last": True}  # and a fused optimizer, whose moments lie as the weights do
    unbroken = run(tmp_path / "unbroken", 2, given)
    kills = [
        (3, 1, 3, "before"),
        (2, 0, 8, "within"),
        (1, 0, 10, "after"),
        (5, 4, 14, "after"),
        (8, 0, 21, "within"),
        (2, 1, 29, "before"),
    ]
    assert through_kills(tmp_path / "killed", given, kills, 4) == unbroken
    assert [life["world"] for life in lives(tmp_path / "killed")] == [3, 2, 1, 5, 8, 2, 4]


# ---- what is pinned, and who is refused -----------------------------------------------------------
def test_another_thread_count_is_refused_and_another_build_is_said(tmp_path, monkeypatch):
    facts = bits.facts(CPU)
    build = facts["build of torch"]
    monkeypatch.setattr(bits, "facts", lambda device: facts)
    opts = stores.options(tmp_path, virtual_ranks=2)
    with stores.a_life(opts) as life:
        stores.save(life, 1)
    facts["build of torch"] = "another"
    with stores.a_life(opts) as life:
        assert f"build of torch was {build}, now another" in " ".join(life.said)
    facts["CPU threads per process"] += 1
    stores.refused(opts, "CPU threads per process was 1, now 2")


# ---- parts ----------------------------------------------------------------------------------------
def small(world, virtual_ranks):
    """Steps of a net of the tests, without a script around them."""
    opts = options(Path("unused"), CNN | {"virtual_ranks": virtual_ranks, "clip_grad_norm": 0.0})
    pinned.pin(opts)
    net = build_model(opts, Facts("pictures", 4, (1, 12, 12)))
    one = Samples(torch.zeros(1, 1, 12, 12), torch.zeros(1, dtype=torch.int64))
    return Steps(net, opts, world, split=one, samples=107)


def step(steps):
    torch.manual_seed(steps.state.progress.step)
    x, y = torch.randn(24, 1, 12, 12), torch.randint(4, (24,))
    steps.step(steps.batch(x, y))


def test_a_gradient_of_minus_zero_is_a_gradient_and_a_weight_without_one_has_none():
    def without_a_gradient(world):
        net = torch.nn.ParameterDict({"used": torch.ones(2), "unused": torch.ones(2), "w": torch.ones(2)})

        def task(model, samples):
            used = net["used"].sum() if samples[1] == 2 else 0
            return {"loss": (net["w"].sum() - 0.0 * used, 1), "acc": (0, 1)}

        v = torch.arange(4)
        steps = Steps(net, Options(virtual_ranks=4), world)
        steps.backward(steps.batch(v, v), task)
        return [name for name, p in net.items() if p.grad is None]

    assert fork_ranks(2, without_a_gradient) == [["unused"]] * 2


@pytest.mark.parametrize("slices", [3, 8])
def test_a_step_on_gpus_sends_no_message_and_has_the_bits_of_one_that_does(monkeypatch, slices):
    """Each rank's messages grow with the ranks; a collective is one call a bucket."""

    def stepped(world):
        messages = []
        batched = dist.batch_isend_irecv
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: messages.extend(ops) or batched(ops))
        steps = small(world, slices)
        for _ in range(2):
            step(steps)
        return len(messages), [p.tolist() for p in steps.state.names]

    sent = fork_ranks(3, stepped)
    assert all(messages >= 8 for messages, _ in sent), "two ranks, to and from each, twice a step"
    monkeypatch.setattr(bits, "is_gpu", lambda device: True)
    assert fork_ranks(3, stepped) == [(0, weights) for _, weights in sent]


def test_buckets_are_sent_in_one_order_whichever_thread_of_autograd_fills_them():
    """With a net over several devices autograd has a thread a device: in another order sums are swapped."""
    net = torch.nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    slices = Slices(net, ALONE, 1)
    order = []

    def the_other_device_is_ready(carries):
        other.start()
        other.join(0.2)

    def bucket(name, weight, collect):
        send = partial(order.append, name)
        return SimpleNamespace(members=[weight], waiting={weight}, collect=collect, send=send)

    first = bucket("A", net.weight, the_other_device_is_ready)
    second = bucket("B", net.bias, lambda carries: None)
    slices.bucket_of = {net.weight: first, net.bias: second}
    slices.filling = [first, second]
    slices.carries = slices.next = 0
    other = threading.Thread(target=slices._ready, args=(net.bias,))
    slices._ready(net.weight)
    other.join()
    assert order == ["A", "B"]
