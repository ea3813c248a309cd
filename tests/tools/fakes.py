"""GPUs for tests on CPUs.

    with fake_streams() as default:      copies to pinned memory (tensors.py) land only when somebody asks
        on_a_gpu(store, default)         the updates of its state are late, too; a forward comes behind them
        default.hang()                   it comes to nothing more until `.set()` of what this returns
        default.broken = error           each event on it raises, as after a device-side assert
    with fake_streams(gpu=1):            a thread that has not chosen GPU 1 cannot ask: GPU 0 is full
    with fake_gpu() as made:             tensors on "cuda:0" have a device and no numbers: with a CPU's in
        net = made(nn.Linear, 6, 3)      one operation they are an error; a backward leaves gradients of ones
    OverDevices("cpu", parts=[[p], [q]]) a GradScaler to which each list lies on a device of its own

Each event comes as late, or as far apart, as CUDA allows, so no test needs luck.
"""

import contextlib
import importlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common.checkpoint import tensors
from common.training import state as training_state

backward = importlib.import_module("common.training.step")  # the door has a function of this name


# ---- streams --------------------------------------------------------------------------------------
HERE = threading.local()  # the GPU and the stream of this thread


def gpu_here():
    return getattr(HERE, "gpu", 0)


class Stream:
    """Work in order; late work, and what is behind it, is done when somebody asks for it."""

    broken = None  # the error of this GPU

    def __init__(self, device=None):
        self.gpu = gpu_here()
        self.work = []
        self.done = 0
        self.turn = threading.RLock()

    def submit(self, job, late=False):
        self.work.append(job)
        if not late and self.done == len(self.work) - 1:
            self.go_on()

    def run(self, count):
        while self.done < count:
            with self.turn:
                if self.done < count:
                    self.work[self.done]()
                    self.done += 1

    def go_on(self):
        while self.done < len(self.work) and getattr(self.work[self.done], "free", lambda: True)():
            self.run(self.done + 1)

    def synchronize(self):
        self.run(len(self.work))

    def record_event(self):
        return Event(self)

    def __enter__(self):
        self.before = torch.cuda.current_stream()
        HERE.stream = self

    def __exit__(self, *_):
        HERE.stream = self.before

    def hang(self):
        """All later work waits until the event that is returned is set."""
        gate = threading.Event()

        def wait():
            gate.wait()

        wait.free = gate.is_set
        self.submit(wait, late=True)
        return gate


class Event:
    def __init__(self, stream):
        self.stream = stream
        self.count = len(stream.work)

    def query(self):
        """CUDA begins on the thread's GPU, whichever GPU the event is on."""
        if self.stream.broken:
            raise self.stream.broken
        if self.stream.gpu != gpu_here():
            raise RuntimeError("CUDA error: out of memory")
        if self.stream.done >= self.count:
            return True
        self.stream.go_on()
        return False


@contextlib.contextmanager
def fake_streams(gpu=0):
    """Images take CPU tensors for a GPU's; yields the default stream."""

    def set_device(device):
        HERE.gpu = torch.device(device).index

    set_device(f"cuda:{gpu}")
    default = Stream()
    copy = torch._foreach_copy_

    def current(device=None):
        return getattr(HERE, "stream", default)

    def foreach_copy(targets, sources, non_blocking=False):
        current().submit(lambda: copy(targets, sources), late=non_blocking)

    with pytest.MonkeyPatch.context() as patch:
        for name, fake in (
            ("current_stream", current),
            ("set_device", set_device),
        ):
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch, "_foreach_copy_", foreach_copy)
        patch.setattr(training_state, "has_peers", lambda: True)
        patch.setattr(tensors, "pinned", lambda buffer, devices: True)
        patch.setattr(tensors, "mark", lambda device: current().record_event())
        yield default


def on_a_gpu(store, default):
    """The state of this store lies on a GPU, which makes each update late, with the gradient of its step."""
    state = store.state
    state.device = torch.device("cuda")
    state.devices = [state.device]
    store.saver.sides = [Stream()]
    step = state.optimizer.step
    make_state(state.optimizer)
    state.net.register_forward_pre_hook(lambda *_: default.go_on())

    def launch():
        gradients = [p.grad for p in state.names]

        def update():
            for p, gradient in zip(state.names, gradients, strict=True):
                p.grad = gradient
            step()
            for p in state.names:
                p.grad = None

        default.submit(update, late=True)

    state.optimizer.step = launch


def make_state(adam):
    """As it is once a step was launched: the program has it at once, its numbers come late."""
    for group in adam.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    adam.step()
    for values in adam.state.values():
        values["step"].zero_()
    adam.zero_grad()


@contextlib.contextmanager
def fake_gpu():
    """Yields `made(module, ...)`, the module on that GPU."""
    nets = []

    def made(module, *arguments):
        with torch.device("cuda:0"):
            nets.append(module(*arguments))
        return nets[-1]

    def backward(loss, gradient=None):
        for p in nets[-1].parameters():
            p.grad = torch.ones_like(p) if p.grad is None else p.grad
            for hook in (p._post_accumulate_grad_hooks or {}).values():
                hook(p)

    with fake_streams(), FakeTensorMode(allow_non_fake_inputs=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", backward)
        patch.setattr(torch.Tensor, "tolist", lambda t: [1.0] * t.numel())
        patch.setattr(torch.Tensor, "item", lambda t: 1.0)
        for kind in (int, float, bool):
            patch.setattr(torch.Tensor, f"__{kind.__name__}__", lambda t, kind=kind: kind(1))
        yield made


# ---- overflows ------------------------------------------------------------------------------------
class OverDevices(torch.amp.GradScaler):
    """`parts`: the parameters of each device."""

    def __init__(self, *args, parts, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = parts

    def _unscale_grads_(self, optimizer, inverse, found, allow_fp16):
        noted = {}
        for index, part in enumerate(self.parts):
            groups = SimpleNamespace(param_groups=[{"params": part}])
            (overflow,) = super()._unscale_grads_(groups, inverse, found.clone(), allow_fp16).values()
            noted[torch.device("cpu", index) if index else torch.device("cpu")] = overflow
        return noted
