"""--shard: memory is spread over the replicas a block at a time, for any net; one exchange per global batch.
"""
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from nets import LENGTH, WORDS, Gpt
from ranks import fork_ranks
from samples import Samples, share_of
from torch import nn
from torch.nn import functional as F
from torch.profiler import profile

from common.models.gpt import build_gpt
from common.options import Options
from common.pipeline import backward, split
from common.training import TrainState, build_optimizer, find_task

N = 8


class Encoder(nn.Module):
    """Layers that torch's own encoder calls, and a weight that is used outside of its module."""

    def __init__(self, width=192):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.linear(self.encoder(self.words(x) * self.scale)[:, -1], self.words.weight)


def sequences():
    """Sequences of words; to be predicted: the first of them."""
    x = torch.randint(WORDS, (N, LENGTH), generator=torch.Generator().manual_seed(3))
    return Samples(x, x[:, 0])


def last_word(width=192):
    gpt = build_gpt(SimpleNamespace(vocab=WORDS, classes=WORDS, sample_shape=(LENGTH,)), f"8x2x{width}")
    return nn.Sequential(*list(gpt)[:-1], nn.Sequential(Last(), gpt.head))


class Last(nn.Module):
    def forward(self, x):
        return x[:, -1]


def loose():
    """Blocks whose parts the net calls itself, and a head that has the embedding's weight."""
    net = Gpt(width=192)
    for weight in (net.never, net.at_times):
        weight.requires_grad_(False)
    net.eval().train = lambda mode=True: net  # no dropout
    return net


def tied():
    """Two blocks that have one weight."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    blocks[2][0].weight = blocks[0][0].weight
    return nn.Sequential(nn.Embedding(WORDS, 16), *blocks, nn.Sequential(Last(), nn.Linear(16, WORDS)))


NETS = {"blocks in a row": (last_word, True), "an encoder": (Encoder, True), "loose parts": (loose, False),
        "tied blocks": (tied, False)}


def measured(world, name, micro):
    """Of one backward: bytes held before and at most added, of the weights' bytes; exchanges; the weights."""
    torch.manual_seed(0)
    net = NETS[name][0]().double()
    opts = Options(script="mp", global_batch_size=N, micro_batch_size=micro, shard=world.size > 1, stages=1)
    data = SimpleNamespace(train=sequences(), classes=WORDS)
    whole = sum(p.nbytes for p in net.parameters())
    model = split(net, opts, world, data, find_task(opts))
    state = TrainState(net, build_optimizer(net, opts), opts, N)
    batch = share_of(data.train.x, data.train.y, opts, world.rank, world.size)
    held = sum(t.nbytes for named in state.tensors().values() for t in named.values())
    with profile(profile_memory=True) as seen:
        backward(model, batch, state, world)
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    grown = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    state.update(N)
    weights = {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
               for name, p in net.named_parameters()}
    return SimpleNamespace(held=held / whole, peak=max(grown) / whole, weights=weights)


@pytest.mark.parametrize("name", NETS)
def test_a_sharded_net_gathers_a_block_at_a_time_and_exchanges_gradients_once_a_batch(name):
    """More would be its weights whole while a step runs, or a gradient of every micro batch.

    Parts that the net calls itself are no block: they are gathered for the whole step.
    The ranks' least peak counts: gloo's threads let go of memory when they come to it.
    """
    alone, = fork_ranks(1, measured, name, 8)
    for size, most in ((4, 1.1), (2, 2.1)):
        ranks = fork_ranks(size, measured, name, 2)
        assert min(rank.peak for rank in ranks) < most or not NETS[name][1], "times the weights"
        for rank in ranks:
            assert rank.held == pytest.approx(alone.held / size, rel=0.1)
            for key, weight in rank.weights.items():
                assert (weight - alone.weights[key]).abs().max() < 1e-10, key
