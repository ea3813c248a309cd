import importlib
import threading
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_streams
from ranks import fork_ranks
from refusals import refusal
from safetensors.torch import load_file
from samples import state_of
from test_rescue import a_run, step
from test_tasks import ALONE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.checkpoint.folder import checkpoints
from common.data.samples import TensorSamples
from common.extras.tasks import OwnTask
from common.options import Options
from common.training import evaluate
from common.training.evaluate import BLOCK, block_size
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
    opts = Options(ema_decay=ema)
    state = state_of(net, opts, n)
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


@pytest.mark.parametrize("blocks", [10, 10_000])
def test_a_rank_makes_no_tensor_for_the_blocks_of_others(blocks, monkeypatch):
    module = importlib.import_module("common.training.evaluate")  # the door has a function of this name
    monkeypatch.setattr(module, "gather", lambda world, value: [value])
    world = SimpleNamespace(rank=0, size=blocks, all_sum=lambda totals: totals)
    split = split_of(5)
    split.__class__ = type("Long", (TensorSamples,), {"__len__": lambda self: blocks * BLOCK})
    split.fetch = lambda ids, *_: (torch.zeros(len(ids), 5), torch.zeros(len(ids), dtype=torch.long))
    net = made()
    state = state_of(net, Options())
    with Tensors() as made_by_torch:
        evaluate(net, split, state, world, state.task)
    assert made_by_torch.count < 150


class Tensors(TorchDispatchMode):
    """Counts the tensors that operations return."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        self.count += len(result) if isinstance(result, (list, tuple)) else 1
        return result


def test_averaged_weights_are_evaluated_and_the_net_keeps_its_own():
    ((found, weight),) = fork_ranks(1, metrics_of, 9, 0.9)
    assert found["val_loss"] == pytest.approx(1.0986, abs=1e-3)  # all zero: log 3
    assert found["predictions"] == [0] * 9
    assert any(weight[0])


def test_a_judge_that_returns_nothing_for_one_block_is_told_so():
    net = nn.Linear(5, 3)

    def judge(net, batch):
        if len(batch[0]) == BLOCK:
            return {"acc": (1, 1)}

    with refusal("what the judge returned"):
        task = OwnTask(judge, "the judge")
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
            write = store.saver.write
            changed = threading.Event()
            store.saver.write = lambda *args: (changed.wait(20), write(*args))[1]
            store.save()
            split = split_of(8, 4)

            def land():
                changed.set()
                store.saver.wait()

            if between == "evaluate":
                fetch = split.fetch
                split.fetch = lambda *args: (land(), fetch(*args))[1]  # while the net has the averages
                evaluate(state.net, split, state, world, state.task)
            else:
                step(state)
                land()
            store.close()
        ((_, folder),) = checkpoints(run)
        return [
            n for n, t in load_file(folder / "model.safetensors").items() if not torch.equal(t, wanted[n])
        ]

    assert fork_ranks(1, live) == [[]]


def test_an_evaluation_with_many_classes_takes_few_samples_at_once_and_any_world_the_same_ones():
    def size(tokens, classes, **more):
        return block_size(SimpleNamespace(tokens=tokens, classes=classes), Options(**more))

    assert [size(1, 10), size(128, 256), size(128, 50304), size(1024, 50304)] == [256, 32, 2, 1]
    assert size(1, None, micro_batch_size=8) == 8
    assert size(1, None, task="own.py:loss", micro_batch_size=8) == 8
    assert size(1, None, task="own.py:loss", virtual_ranks=4, global_batch_size=66) == 17
