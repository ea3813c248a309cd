"""What the tests of the store stand on: a tiny state in which every value tells its step, stores over it,
worlds of one.
"""

import contextlib
import errno
import os
import signal
import uuid
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch._dynamo  # noqa: F401  (torch.optim imports it: seconds, which no deadline of a test should pay)
from refusals import refusal
from samples import ALONE, state_of
from torch import nn

from common.checkpoint import Layout
from common.checkpoint.disk import Damaged
from common.checkpoint.fence import Fenced
from common.checkpoint.folder import checkpoints
from common.checkpoint.reader import read_facts
from common.checkpoint.tensors import Image, read_file
from common.errors import UserError
from common.options import Options
from common.store import CheckpointStore
from common.store.load import load_newest

SAMPLED = pytest.mark.parametrize(
    "every", [pytest.param(29, id="every 29th"), pytest.param(1, id="all", marks=pytest.mark.long)]
)


def options(folder, **flags):
    return Options(
        run_dir=folder / "run", **{"keep": 2, "workers": 0, "save_every": 1, "save_seconds": 0} | flags
    )


def world_of_one():
    return replace(ALONE, life=uuid.uuid4().hex[:12])


def tiny_net():
    """Names and shapes of many kinds, and still only a few hundred bytes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


class Adapted(nn.Module):
    """A tiny net of which some weights, one under two names, do not train; their values tell no step."""

    def __init__(self, frozen=True):
        super().__init__()
        torch.manual_seed(0)
        self.still = nn.Linear(3, 2)
        self.still_too = nn.Linear(3, 2, bias=False)
        self.still_too.weight = self.still.weight
        self.still.requires_grad_(not frozen)
        self.adapter = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)


def tiny_state(opts, net=None, samples=None):
    net = net or tiny_net()
    state = state_of(net, opts, samples or 10 * opts.global_batch_size)
    for p in state.weights:
        p.grad = torch.zeros_like(p)
    state.optimizer.step()  # it remembers something, as after any step
    for p in state.weights:
        p.grad = None
    return state


@torch.no_grad()
def at_step(state, step):
    """The state as of `step`: every tensor and every counter says so."""
    with state.lock:
        for part in state.tensors().values():
            for name in part:
                part[name].copy_(expected(part[name], step, name))
        state.progress.step = step
        state.progress.epoch = step // 10
        state.progress.position = step % 10
    return state


def expected(tensor, step, name=""):
    values = torch.arange(tensor.numel()).reshape(tensor.shape) + (0 if name.startswith("still") else step)
    return values % 2 if tensor.dtype == torch.bool else values.to(tensor.dtype)


def is_at(state, step):
    """Whether every tensor and every counter is that of `step`, and of no other."""
    return (state.progress.step, state.progress.epoch, state.progress.position) == (
        step,
        step // 10,
        step % 10,
    ) and all(
        torch.equal(tensor, expected(tensor, step, name))
        for part in state.tensors().values()
        for name, tensor in part.items()
    )


def images_are_at(images, step):
    return all(
        torch.equal(view, expected(view, step, name))
        for image in images.values()
        for name, view in image.views.items()
    )


def new_store(opts, world=None, fingerprint="f" * 64):
    return CheckpointStore(opts, world or world_of_one(), fingerprint)


@contextlib.contextmanager
def heard():
    """Inside, what the store says goes into the list that this yields."""
    said = []
    with contextlib.ExitStack() as stack:
        for name in ("store.store", "store.load", "store.saver"):
            stack.enter_context(mock.patch(f"common.{name}.say", said.append))
        for name in ("changed", "differ", "owner", "take_over"):
            stack.enter_context(mock.patch(f"common.extras.{name}.say", said.append))
        yield said


def started(opts, world=None):
    """(a store over a tiny state, that state), restored."""
    store = new_store(opts, world)
    state = tiny_state(opts)
    store.restore(state)
    return store, state


@contextlib.contextmanager
def a_life(opts, net=None, samples=None, **given):
    """store, state, source, said: one life of the run from restore to close, in this process."""
    store = new_store(opts, **given)
    state = tiny_state(opts, net, samples)
    try:
        with heard() as said:
            source = store.restore(state)
            yield SimpleNamespace(store=store, state=state, source=source, said=said)
            store.close()
    finally:
        end(store)


def resumes_at(opts, step, net=None, **given):
    """Whether a new life begins with the state of that step."""
    with a_life(opts, net, **given) as life:
        return is_at(life.state, step)


def refused(opts, match, code=2, **given):
    """What a life is told that must not begin."""
    with refusal(match, code) as told, a_life(opts, **given):
        pass
    return str(told.value)


def end(store):
    """What the death of the process would do to its lock."""
    if hasattr(store, "saver"):  # else it was refused
        store.saver.error = None
        store.saver.pool.shutdown()
    if store.owns:
        store.fence.release()
        store.owns = False


def write(store, step):
    """Save the state of `step` to the end, or until the store has an error."""
    at_step(store.state, step)
    store.save()
    store.saver.wait()


def save(life, step):
    """Save the state of `step` and wait until it is on the disk; what went wrong is raised."""
    write(life.store, step)
    saver = life.store.saver
    if saver.error:
        error = saver.error
        saver.error = None
        raise error if isinstance(error, Exception) else OSError(error)


def announced_rescue(store, step=None):
    """What a survivor has saved, in words; "" if nothing, as with a state that must not be saved."""
    if step is not None:
        at_step(store.state, step)
    try:
        return store.rescue()
    except UserError as error:
        if isinstance(error, Fenced):
            raise
        return ""


def two_checkpoints(folder, steps=(1, 2), net=None, **flags):
    """A run with checkpoints of these steps; (opts, folder of checkpoints)."""
    opts = options(folder, **flags)
    with a_life(opts, net) as life:
        for step in steps:
            save(life, step)
    return opts, opts.run_dir / "checkpoints"


def images_for(opts, net=None):
    return {part: Image(tensors) for part, tensors in tiny_state(opts, net).tensors().items()}


def load_into(images, root):
    """What load_newest finds in the folder; it reads into the views of these images."""
    tensors = {kind: image.views for kind, image in images.items()}
    layout = Layout(tensors)
    found = load_newest(world_of_one(), layout, "", checkpoints(root.parent), True)
    for name, tensor in layout.remembered.items():
        images["optimizer"].views[name].copy_(tensor)
    return found


def load(root, images):
    """(step, images really hold that step) of the newest that verifies; nothing may be raised."""
    with heard():
        found = load_into(images, root)
    step = found.facts.get("step", -1)
    return step, step >= 0 and images_are_at(images, step)


def damaged(path, table, count=1):
    """Whether the check of this one file, by so many threads, refuses it, as a start would."""
    try:
        read_facts(2, path.parent) if table is None else read_file(path, table, count=count)
    except Damaged:
        return True


def full(path, *_):
    """In the place of what writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def flips(path, every):
    """(bit, whether to try a whole start), with that bit of the file changed; every n-th bit in turn.

    A start costs milliseconds, the check of one file a tenth. So the check sees each bit, and a start one or
    two of each byte, at changing places of it.
    """
    data = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for bit in range(0, len(data) * 8, every):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit % 8]), at)
            yield bit, bit // every % 7 == 0
            os.pwrite(file.fileno(), data[at : at + 1], at)


def steps_of(opts):
    return [step for step, _ in checkpoints(opts.run_dir)]


@contextlib.contextmanager
def child(function):
    """`function` in a forked process; yields its pid, and ends it."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@contextlib.contextmanager
def lives(opts, then=lambda life: signal.pause(), first=lambda: None):
    """The pid of a child that owns the run by now, and goes on with `then`; its life begins after `first`."""
    reader, writer = os.pipe()

    def live():
        first()
        with a_life(opts) as life:
            os.write(writer, b"!")
            then(life)

    with child(live) as pid:
        os.close(writer)
        assert os.read(reader, 1), "the child never owned the run"
        os.close(reader)
        yield pid
