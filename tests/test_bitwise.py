"""--virtual-ranks: one digest over weights, optimizer and buffers at any world size, through kills and resizes.

Whole scripts run in forked ranks: data, store, rescue, log and evaluation are those of a run by hand. The long form
(`pytest -m long`) takes 200 steps and more, and all worlds.
"""
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from ranks import fork_ranks

import train_ddp
import train_mp
from common import pinned
from common.options import Options

NETS = Path(__file__).with_name("nets.py")
CNN = {"model": f"{NETS}:cnn", "dataset": f"{NETS}:pictures", "global_batch_size": 24, "optimizer": "adamw", "weight_decay": 0.05,
       "ema_decay": 0.9, "clip_grad_norm": 1.0, "lr_schedule": "cosine", "mixup": 0.4, "label_smoothing": 0.1}
GPT = {"model": f"{NETS}:gpt", "dataset": f"{NETS}:words", "global_batch_size": 20, "optimizer": "adamw", "weight_decay": 0.1}
LSTM = {"model": "lstm", "dataset": "sentiment-large", "global_batch_size": 27, "clip_grad_norm": 1.0, "max_steps": 12}
RESNET = {"model": "resnet18", "dataset": f"{NETS}:colours", "global_batch_size": 24, "optimizer": "sgd", "max_steps": 4}
STEPS = 5                                         # an epoch of pictures: 24, 24, 24, 24 and a ragged 11 samples


def life(world, script, opts, kill=None):
    """A rank's life in a script, from its options to its end; `kill` = (rank, step, phase): SIGKILL, there."""
    world = replace(world, devices=tuple(map(torch.device, opts.devices)) or world.devices)
    script.join = lambda opts: (pinned.pin(opts), world)[1]
    script.leave = lambda world: world.meet("leave")
    torch.manual_seed(os.getpid())                # nothing may depend on the generator a process happens to have
    if kill and kill[0] == world.rank:
        die_at(script, *kill[1:])
    try:
        script.main(opts)
    except SystemExit as end:
        return end.code


def die_at(script, step, phase):
    def die(state):
        if state.step + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)

    original = script.backward

    def backward(model, batch, state, world):
        if phase == "before":
            die(state)
        if phase == "within" and world.size > 1:
            model.net.register_forward_hook(lambda *_: die(state))
        totals = original(model, batch, state, world)
        if phase == "after":
            die(state)
        return totals

    script.backward = backward


def options(folder, given):
    return Options(**{"run_dir": folder, "virtual_ranks": 8, "epochs": 6, "log_every": 1, "tensorboard": False, "keep": 2,
                      "save_every": 4, "device": "cpu", "check_every": 5, "hang_timeout": 60} | given)


def run(folder, world, given, script=train_ddp, kill=None):
    """Train until the end, or until the kill; returns what a run leaves behind that its bits decide."""
    may_die = range(world) if kill else ()
    fork_ranks(world, life, script, options(folder, given), kill, may_die=may_die, deadline=600)
    return None if kill else left_by(folder)


def left_by(folder):
    newest = max((folder / "checkpoints").glob("step-*"))
    return (json.loads((newest / "manifest.json").read_text())["digest"], (folder / "metrics.jsonl").read_text())


def one_digest(tmp_path, given, worlds):
    found = {world: run(tmp_path / f"w{world}", world, given) for world in worlds}
    assert len({digest for digest, _ in found.values()}) == 1, {world: digest[:12] for world, (digest, _) in found.items()}
    assert len(set(found.values())) == 1, "losses, hits and evaluations of every step are equal to the last digit"
    return found[worlds[0]]


# ---- any world ------------------------------------------------------------------------------------------------------
def test_a_cnn_with_batch_norm_dropout_mixup_adamw_averages_and_clipping_is_the_same_at_any_world(tmp_path):
    digest, metrics = one_digest(tmp_path, CNN, (1, 2, 3, 4, 5, 8))
    assert len(metrics.splitlines()) == 6 * STEPS + 6, "every step logged, every epoch evaluated"


def test_a_gpt_with_tied_weights_and_unused_parameters_is_the_same_at_any_world(tmp_path):
    one_digest(tmp_path, GPT, (1, 3, 8))


def test_an_lstm_over_ragged_batches_is_the_same_at_any_world(tmp_path):
    one_digest(tmp_path, LSTM | {"global_batch_size": 1500, "epochs": 4}, (1, 2, 5))


def test_a_resnet18_is_the_same_at_any_world(tmp_path):
    one_digest(tmp_path, RESNET, (1, 2, 3))


def test_slices_that_are_no_power_of_two_give_one_digest_too(tmp_path):
    one_digest(tmp_path, CNN | {"virtual_ranks": 7, "epochs": 2}, (1, 2, 3, 7))


def test_bf16_and_channels_last_give_one_digest_too(tmp_path):
    one_digest(tmp_path, CNN | {"epochs": 2, "amp": "bf16", "channels_last": True}, (1, 3))


def test_two_threads_give_one_digest_too(tmp_path):
    one_digest(tmp_path, CNN | {"epochs": 1, "threads": 2}, (1, 3))


def test_train_mp_ends_in_the_digest_of_train_ddp(tmp_path):
    ddp = run(tmp_path / "ddp", 3, CNN | {"epochs": 2})
    mp = run(tmp_path / "mp", 1, CNN | {"epochs": 2, "script": "mp", "devices": ("cpu", "cpu")}, train_mp)
    assert ddp == mp


def test_plain_mode_gives_other_bits_at_other_worlds_so_this_check_can_fail(tmp_path):
    plain = CNN | {"virtual_ranks": 0, "epochs": 1}
    assert run(tmp_path / "w1", 1, plain)[0] != run(tmp_path / "w2", 2, plain)[0]
    assert run(tmp_path / "again", 2, plain)[0] == run(tmp_path / "w2b", 2, plain)[0], "but equal runs are equal"


# ---- through kills and resizes --------------------------------------------------------------------------------------
def through_kills(folder, given, kills, last_world):
    """Lives of (world, rank, step, phase), each ended by a SIGKILL; then one that ends the run."""
    for world, *kill in kills:
        run(folder, world, given, kill=kill)
        assert (folder / "checkpoints").exists()
    return run(folder, last_world, given)


def test_kills_and_resizes_leave_no_trace_in_the_bits(tmp_path):
    unbroken = run(tmp_path / "unbroken", 2, CNN)
    kills = [(3, 1, 3, "before"), (2, 0, 8, "within"), (1, 0, 10, "after"), (5, 4, 14, "after"), (8, 0, 21, "within"),
             (2, 1, 29, "before")]
    assert through_kills(tmp_path / "killed", CNN, kills, 4) == unbroken
    lives = [json.loads(line) for line in (tmp_path / "killed" / "ledger.jsonl").read_text().splitlines() if '"life"' in line]
    assert [event["world"] for event in lives if event["event"] == "life"] == [3, 2, 1, 5, 8, 2, 4]
