"""--shard: memory is spread over the replicas a block at a time, for any net."""

import ctypes
import signal
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from jobs import CLEAN, PACED, audit, losses, steps_on_disk, wait_for, weights
from nets import LENGTH, WORDS, Gpt
from ranks import fork_ranks
from refusals import refusal
from samples import Samples, share_of, state_of
from test_bitwise import run
from test_readme import COMMON, fenced, section
from torch import nn
from torch.profiler import profile
from torch.testing import assert_close

import train_mp
from common.models.gpt import build_gpt
from common.options import Options
from common.pipeline import backward, split
from common.training import find_task

N = 8


class Last(nn.Module):
    def forward(self, x):
        return x[:, -1]


def gpt():
    net = build_gpt(SimpleNamespace(vocab=WORDS, classes=WORDS, sample_shape=(LENGTH,)), "8x2x192")
    return nn.Sequential(*list(net)[:-1], nn.Sequential(Last(), net.head))


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


def scale():
    """A weight without a dimension."""
    net = nn.Sequential(nn.Embedding(WORDS, 16), Last(), nn.Linear(16, WORDS))
    net.scale = nn.Parameter(torch.ones(()))
    return net


def refused(world):
    with refusal("--shard: ValueError"):
        measured(world, scale, 2, 2)


def test_a_weight_that_cannot_be_spread_is_refused():
    fork_ranks(2, refused)


def spread(world, net, n=N, **how):
    """(the state, a function that does one backward)."""
    opts = Options(script="mp", global_batch_size=n, stages=1, **how)
    world = world.in_stages(1, opts.shard)
    x = torch.randint(WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(3))
    data = SimpleNamespace(train=Samples(x, x[:, 0]), classes=WORDS)
    model = split(net, opts, world, data, find_task(opts))
    state = state_of(net, opts, n)
    batch = share_of(x, x[:, 0], opts, world.rank, world.size)
    return state, lambda: backward(model, batch, state, world)


def measured(world, make, micro, shards=0):
    """Of one backward: bytes held before and at most added, times those of the weights; the weights after."""
    torch.manual_seed(0)
    net = make().double()
    whole = sum(p.nbytes for p in net.parameters())
    state, back = spread(world, net, micro_batch_size=micro, shard=shards)
    held = sum(t.nbytes for named in state.tensors().values() for t in named.values())
    state.first_forward.begin()
    with profile(profile_memory=True) as seen:
        back()
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    grown = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    state.update(N)
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in net.named_parameters()
    }
    return SimpleNamespace(held=held / whole, peak=max(grown) / whole, weights=weights)


@pytest.mark.parametrize("make", [gpt, loose, tied])
def test_a_sharded_net_gathers_a_block_at_a_time_and_exchanges_gradients_once_a_batch(make):
    """More would be its weights whole while a step runs, or a gradient of every micro batch.

    The ranks' least peak counts: gloo's threads let go of memory when they come to it.
    """
    (alone,) = fork_ranks(1, measured, make, 8)
    for shards, most in ((4, 1.1), (2, 2.1)):
        ranks = fork_ranks(4, measured, make, 2, shards)
        assert min(rank.peak for rank in ranks) < most or make is not gpt, "times the weights"
        for rank in ranks:
            assert rank.held == pytest.approx(alone.held / shards, rel=0.1)
            for key, weight in rank.weights.items():
                assert (weight - alone.weights[key]).abs().max() < 1e-10, key


class Mean(nn.Module):
    """A running mean of its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x


def running_mean(world, shards):
    """After a batch of seven: one rank has a micro batch less than the other."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(WORDS, 16), Mean(), Last(), nn.Linear(16, WORDS))
    _, back = spread(world, net, 7, micro_batch_size=3, shard=shards)
    back()
    return net[1].mean.tolist()


def test_an_example_in_place_of_a_micro_batch_moves_no_statistics():
    spread, _ = fork_ranks(2, running_mean, 2)
    whole, _ = fork_ranks(2, running_mean, 0)
    assert spread == pytest.approx(whole, rel=1e-6)


# ---- elastic --------------------------------------------------------------------------------------
def test_shard_a_whole_copy_may_die_at_once_and_shards_copies_and_stages_may_change(jobs, tmp_path):
    run = tmp_path / "run"
    alone = tmp_path / "alone"

    def start(ranks, *flags):
        never = ("--save-every=0", "--save-seconds=0", "--check-every=2")
        return jobs.torchrun(ranks, "train_mp.py", *PACED, f"--run-dir={run}", *never, "--shard=2", *flags)

    def stop(job, step, life):
        wait_for(run, step, life, job)
        job.kill(signal.SIGTERM)
        job.wait()
        assert " saved by rank " in job.output.rpartition("stopped on SIGTERM")[2], job.output

    jobs.python("train_ddp.py", *PACED, f"--run-dir={alone}", PACE="0").ends_with(0)
    job = start(4, "--stages=1")
    for pid in wait_for(run, 4, 0, job)["pids"][2:]:
        jobs.kill(pid)
    stop(job, 8, 1)
    assert "2 copies of 2 shards: any process may die" in job.output
    stop(start(2, "--stages=1"), 11, 2)
    stop(start(3, "--stages=1"), 14, 3)
    stop(start(4, "--stages=2"), 17, 4)
    jobs.python("train_ddp.py", *PACED, f"--run-dir={run}", PACE="0").ends_with(0)
    assert audit(run) == CLEAN
    assert_close(weights(run), weights(alone), rtol=0, atol=1e-9)


# ---- memory for a net that is larger than a device -------------------------------------------------
class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def between(world, how):
    """Bytes that a forward holds for its backward, times those of the weights in float32."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    libc.mallopt(-3, 1 << 14)  # M_MMAP_THRESHOLD: tensors are mapped, and counted at once
    torch.manual_seed(0)
    net = Blocks()
    state, back = spread(world, net, **how)
    scale = state.scaler.scale
    start = libc.mallinfo2().hblkhd
    held = []

    def looked_at(loss):
        held.append(libc.mallinfo2().hblkhd - start)
        return scale(loss)

    state.scaler.scale = looked_at
    back()
    return max(held) / sum(p.numel() * 4 for p in net.parameters())


class Blocks(nn.Module):
    """Not to be cut, as nets of Hugging Face are."""

    def __init__(self):
        super().__init__()
        first, *layers, head = gpt()
        self.first = first
        self.layers = nn.ModuleList(layers)
        self.head = head

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    "how, most",
    [
        ({"shard": 2, "amp": "bf16"}, 0.45),  # each weight in bf16 would be 0.5
        ({"shard": 2, "micro_batch_size": 1}, 0.85),  # a whole gradient would be 1
        ({"shard": 2, "recompute": True}, 0.3),
    ],
)
def test_shard_amp_micro_batch_size_and_recompute_keep_neither_whole_weights_nor_activations(how, most):
    assert max(fork_ranks(2, between, how)) < most


# ---- the recipe of common/README.md -----------------------------------------------------------------
def test_shard_a_llama_of_the_readme_is_killed_and_resized_and_has_the_loss_of_one_device(tmp_path):
    pytest.importorskip("transformers.models.llama.modeling_llama")  # here, once, and not in each rank
    (recipe,) = fenced(section(COMMON, "A net cut into stages"), "python")
    (tmp_path / "my_llama.py").write_text(recipe)
    (tmp_path / "text").write_text(COMMON)
    given = {
        "model": f"{tmp_path}/my_llama.py:llama",
        "dataset": "text:16",
        "data_dir": f"{tmp_path}/text",
        "virtual_ranks": 0,
        "global_batch_size": 8,
        "max_steps": 12,
    }
    sharded = given | {"script": "mp", "stages": 1, "shard": 2}
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    run(whole, 1, given)
    run(parts, 4, sharded | {"save_every": 100}, train_mp, kill=(1, 5, "before"))
    assert steps_on_disk(parts)[-1] == 4, "the other copy of its part has saved it"
    run(parts, 3, sharded | {"max_steps": 8}, train_mp)
    run(parts, 2, sharded, train_mp)
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-4)
