"""GPUs for tests on CPUs.

    with fake_streams() as default:      copies to pinned memory (tensors.py) land only when somebody asks
        on_a_gpu(store, default)         the updates of its state are late, too; a forward comes behind them
        default.hang()                   it comes to nothing more until `.set()` of what this returns
        default.broken = error           each event on it raises, as after a device-side assert
    with fake_streams(gpu=1):            a thread that has not chosen GPU 1 cannot ask: GPU 0 is full
    with fake_streams(count=2):          two GPUs: `default.others` has the stream of the second one
    with fake_gpus() as made:            tensors on "cuda:0" and "cuda:1" have a device and no numbers: two
        net = made(nn.Linear, 6, 3)      devices in one operation are an error; a backward leaves gradients
                                         of ones; each GPU has a stream of its own
    OverDevices("cpu", parts=[[p], [q]]) a GradScaler to which each list lies on a device of its own

Each event comes as late, or as far apart, as CUDA allows, so no test needs luck.
"""

import contextlib
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common.checkpoint import tensors
from common.extras.fp16 import Scaler
from common.training import state as training_state

# ---- streams --------------------------------------------------------------------------------------
HERE = threading.local()  # the GPU of this thread, and its stream on each GPU


def gpu_here():
    return getattr(HERE, "gpu", 0)


def streams_here():
    return vars(HERE).setdefault("streams", {})


class Stream:
    """Work in order; late work, and what is behind it, is done when somebody asks for it."""

    broken = None  # the error of this GPU

    def __init__(self, gpu=None, gpus=()):
        self.gpu = gpu_here() if gpu is None else gpu
        self.gpus = gpus or (self.gpu,)  # of this process
        self.work = []
        self.done = 0
        self.turn = threading.RLock()

    def submit(self, job, late=False):
        self.work.append(job)
        if not late and self.done == len(self.work) - 1:
            self.go_on()

    def go_on(self):
        """Up to a job that answers False: it is not done."""
        with self.turn:
            while self.done < len(self.work) and self.work[self.done]() is not False:
                self.done += 1

    def synchronize(self):
        while self.done < len(self.work):
            self.go_on()
            time.sleep(1e-3)

    def record_event(self):
        return Event(self)

    def __enter__(self):
        self.before = streams_here().get(self.gpu)
        streams_here()[self.gpu] = self

    def __exit__(self, *_):
        streams_here()[self.gpu] = self.before

    def hang(self):
        """All later work waits until the event that is returned is set."""
        gate = threading.Event()
        self.submit(gate.is_set, late=True)
        return gate


class Event:
    def __init__(self, stream):
        self.stream = stream
        self.count = len(stream.work)

    def query(self):
        """CUDA begins on the thread's GPU, whichever GPU the event is on."""
        if self.stream.broken:
            raise self.stream.broken
        if gpu_here() not in self.stream.gpus:
            raise RuntimeError("CUDA error: out of memory")
        if self.stream.done >= self.count:
            return True
        self.stream.go_on()
        return False


@contextlib.contextmanager
def fake_streams(gpu=0, count=1):
    """Images take CPU tensors for a GPU's; yields the default stream of this GPU, `others` of those after it.

    A tensor lies on this GPU, or where `placed` of that stream says.
    """

    def set_device(device):
        HERE.gpu = torch.device(device).index

    set_device(f"cuda:{gpu}")
    gpus = range(gpu, gpu + count)
    defaults = {each: Stream(each, gpus) for each in gpus}
    default = defaults[gpu]
    default.others = [defaults[each] for each in gpus[1:]]
    default.placed = {}  # {address of a tensor: its GPU, if it is another one}
    copy = torch._foreach_copy_

    def current(device=None):
        index = getattr(device, "index", None)
        index = gpu if index is None else index
        return streams_here().get(index) or defaults[index]

    def foreach_copy(targets, sources, non_blocking=False):
        of_gpu = {}
        for pair in zip(targets, sources, strict=True):
            of_gpu.setdefault(default.placed.get(pair[1].data_ptr(), gpu), []).append(pair)
        for index, pairs in of_gpu.items():
            job = partial(copy, *map(list, zip(*pairs, strict=True)))
            current(torch.device("cuda", index)).submit(job, late=non_blocking)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", current)
        patch.setattr(torch.cuda, "set_device", set_device)
        patch.setattr(torch, "_foreach_copy_", foreach_copy)
        patch.setattr(training_state, "has_peers", lambda: True)
        always = property(lambda image: True, lambda image, value: None)
        patch.setattr(tensors.Image, "is_pinned", always, raising=False)
        patch.setattr(tensors, "mark", lambda device: current(device).record_event())
        yield default


def on_a_gpu(store, default):
    """The state of this store lies on GPUs; the last one makes each update late, with its step's gradient."""
    state = store.state
    streams = [default, *default.others]
    state.devices = [torch.device("cuda", stream.gpu) for stream in streams]
    store.saver.sides = [Stream(stream.gpu, stream.gpus) for stream in streams]
    step = state.optimizer.step

    def arrive(*_):
        for stream in streams:
            stream.go_on()

    state.net.register_forward_pre_hook(arrive)

    def launch():
        gradients = [p.grad for p in state.names]

        def update():
            for p, gradient in zip(state.names, gradients, strict=True):
                p.grad = gradient
            step()
            for p in state.names:
                p.grad = None

        streams[-1].submit(update, late=True)

    state.optimizer.step = launch


@contextlib.contextmanager
def fake_gpus():
    """Yields `made(module, ...)`, the module on the first GPU."""
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

    with (
        fake_streams(count=2),
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(torch.nn.Module, "to", moved)
        patch.setattr(torch.Tensor, "backward", backward)
        patch.setattr(torch.autograd, "backward", backward)
        patch.setattr(torch.cuda, "default_generators", [Generator(), Generator()])
        patch.setattr(torch.Tensor, "tolist", lambda t: [1.0] * t.numel())
        patch.setattr(torch.Tensor, "item", lambda t: 1.0)
        for kind in (int, float, bool):
            patch.setattr(torch.Tensor, f"__{kind.__name__}__", lambda t, kind=kind: kind(1))
        yield made


def moved(net, device):
    """A net on that device: fake weights cannot be swapped in place, as `Module.to` would."""
    for module in net.modules():
        for name, p in module._parameters.items():
            if p is not None and p.device != device:
                module._parameters[name] = torch.nn.Parameter(p.detach().to(device))
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(device)
    return net


class Generator:
    """Of one GPU: a number that grows with each draw."""

    def __init__(self):
        self.state = 0

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


# ---- overflows ------------------------------------------------------------------------------------
class OverDevices(Scaler):
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
