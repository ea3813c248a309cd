import threading

import pytest
import torch
from fakes import fake_streams
from ranks import fork_ranks
from refusals import refusal
from safetensors.torch import load_file
from samples import ALONE, state_of
from test_rescue import a_run, step
from torch import nn

from common.checkpoint.folder import checkpoints
from common.data.samples import TensorSamples
from common.extras.tasks import OwnTask
from common.options import Options
from common.training import evaluate
from common.training.evaluate import BLOCK
from common.training.tasks import SHOWN_SAMPLES


def split_of(n, width=5):
    torch.manual_seed(n)
    x = torch.randn(n, width)
    return TensorSamples((x, torch.randint(0, min(3, width - 2), (n,))), Options(), 3)


def made():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3))


def metrics_of(world, n, ema=0.0):
    net = made()
    state = state_of(net, Options(ema_decay=ema), n)
    if ema:
        for tensor in state.averages.tensors.values():
            tensor.zero_()
    return evaluate(net, split_of(n), state, world, state.task), net[0].weight.tolist()


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_metrics_are_the_same_to_the_last_bit_at_every_world_and_count_each_sample_once(n):
    ((alone, _),) = fork_ranks(1, metrics_of, n)
    split = split_of(n)
    net = made().eval()
    with torch.no_grad():
        out = net(split.x)
    assert alone["val_acc"] == (out.argmax(1) == split.y).sum().item() / n
    assert alone["val_loss"] == pytest.approx(nn.functional.cross_entropy(out, split.y).item(), abs=1e-5)
    assert ("predictions" in alone) == (n <= SHOWN_SAMPLES)
    for world in (2, 5):
        for metrics, _ in fork_ranks(world, metrics_of, n):
            assert metrics == alone, "with the predictions and labels of a small set, on every rank"


def test_averaged_weights_are_evaluated_and_the_net_keeps_its_own():
    ((found, weight),) = fork_ranks(1, metrics_of, 9, 0.9)
    assert found["val_loss"] == pytest.approx(1.0986, abs=1e-3)  # all zero: log 3
    assert found["predictions"] == [0] * 9
    assert any(weight[0])


def test_a_judge_that_returns_nothing_for_one_block_is_told_so():
    task = OwnTask(lambda net, batch: {"acc": (1, 1)} if len(batch[0]) < BLOCK else None, [], spec="judge")
    net = nn.Linear(5, 3)
    with refusal("what --task judge returned"):
        evaluate(net, split_of(BLOCK + 1), state_of(net, Options()), ALONE, task)


@pytest.mark.parametrize("between", ["evaluate", "update"])
def test_a_save_that_is_still_being_copied_holds_the_weights_and_not_what_they_become(run, between):
    """--save-every falls on the last step of an epoch: its evaluation puts averages into the net at once."""

    def live(world):
        with fake_streams():
            state, store = a_run(world, run, "--ema-decay=0.5")
            state.devices = [torch.device("cuda")]
            step(state)
            step(state)
            wanted = {n: t.clone() for n, t in state.net.state_dict().items()}
            changed = threading.Event()
            write = store.saver.write
            store.saver.write = lambda *args: (changed.wait(20), write(*args))[1]
            store.save()

            def land(net, batch):
                changed.set()
                store.saver.wait()
                return {"loss": (0.0, 1)}

            if between == "evaluate":  # the net has the averages
                evaluate(state.net, split_of(8, 4), state, world, OwnTask(land, []))
            else:
                step(state)
                land(state.net, None)
            store.close()
        ((_, folder),) = checkpoints(run)
        found = load_file(folder / "model.safetensors")
        return [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name])]

    assert fork_ranks(1, live) == [[]]
