"""A program in a rehearsal: as it is, on little data, with each step noted.

`Watched` stands in the place of Elastic. A life differs as its `does` says: {"step": (6, 9)}, signal 9 once
step 6 is noted, {"report": (15, 9)} after a report; {"ulp": 1} moves each weight by one ulp at each note;
{"calm": 1} draws the same always, and no BatchNorm trains. `Plain` is the same program without this project:
what this project does to a program alike in each of its runs is seen by nothing else.
"""

import pickle
import signal
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import common.elastic
from common.extras.rehearsed import rehearsal_key
from launch.compare import ROW, signs, sketch_of

STEPS = 20
WHOLE_BATCHES = 4  # of an epoch
SAMPLES = 11  # of a batch, or fewer
REST = 6  # samples of the last batch of an epoch, if that of the whole data has fewer than others, too
DRAWS = {"rand", "uniform", "randn", "normal", "bernoulli", "randint", "exponential"}
CHANGED = {
    "log_every": 1,
    "save_every": 5,
    "max_steps": 0,
    "patience": 0,
    "check_every": 0,
    "workers": 0,
    "tensorboard": False,
    "copy_to": "",  # a bucket holds the user's own run
    "amp": "off",  # what 16 bits round would hide all else
}


class Watched(common.elastic.Elastic):
    """The loop, with notes of each step."""

    def _join(self):
        """Join on few samples."""
        opts = self.opts
        key = rehearsal_key(opts)
        self.data = self.data or common.elastic.load_data(opts, self.sets)
        train, test = self.data.train, self.data.test
        size = min(opts.global_batch_size, SAMPLES)
        rest = min(len(train) % opts.global_batch_size, REST)
        train.count = min(len(train), WHOLE_BATCHES * size + rest)
        test.count = min(len(test), 2 * size + 1)
        batches = -(-train.count // size)
        few = {"run_dir": self.folder / "run", "global_batch_size": size, "epochs": -(-STEPS // batches)}
        self.opts = replace(opts, **CHANGED | few)
        (self.folder / "facts").write_bytes(pickle.dumps((key, self.opts, batches)))
        if "calm" in self.does:
            nn.modules.batchnorm._BatchNorm.train = lambda norm, mode=True: nn.Module.train(norm, False)
            Silence().__enter__()
        self.move()
        super()._join()

    # ---- what is noted, and what then strikes ----
    def _between_steps(self):
        tensors = self.state.tensors()
        self.note("step", tensors["model"] | tensors["optimizer"], self.progress.record)
        super()._between_steps()

    def report(self, **metrics):
        super().report(**metrics)
        self.note("report", {}, self.progress.evaluated)

    def note(self, what, tensors, row):
        """Note these tensors, and numbers of the log, which is rank 0's; the last process strikes."""
        step = self.progress.step
        if self.world.rank == 0:
            tensors |= {ROW + name: torch.tensor([value], dtype=torch.float32) for name, value in row.items()}
        pickle.dump((step, {name: sketch_of(tensor) for name, tensor in tensors.items()}), self.notes)
        strike = self.does.get(what)
        if strike and step >= strike[0] and self.world.rank == self.world.size - 1:
            self.store.saver.wait()
            signal.raise_signal(strike[1])
        self.move()

    def move(self):
        """Move each weight by one ulp, in a run that shows how far rounding leads."""
        for p in self.net.parameters() if "ulp" in self.does else ():
            one = signs(p.numel()).view(p.shape).to(p.device)
            p.data.mul_(1 + torch.finfo(p.dtype).eps * one)


class Silence(TorchDispatchMode):
    """In it torch draws the same number always, by what is in DRAWS, and drops nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **kwargs or {})
        kind = name.removesuffix("_").removesuffix("_like")
        return out.fill_(0.5) if kind in DRAWS else out


class Plain(Watched):
    """One process. Order of samples, seeds, modes and arguments are taken as they are."""

    def _begin(self):
        common.elastic.prepare = lambda *_: None
        self.opts = replace(self.opts, micro_batch_size=0, virtual_ranks=0)
        super()._begin()
        self.state.evaluating = self.evaluating
        # weights are compared alone: of an evaluation, what it leaves in them
        self.state.tensors = lambda: {"model": self.net.state_dict(), "optimizer": {}}

    @contextmanager
    def evaluating(self):
        modes = self.state.modes_now()
        self.net.eval()
        yield
        modes.restore()

    def step(self, loss, count=None):
        if isinstance(loss, dict):
            loss, count = next(iter(loss.values()))
        mean = loss if count is None else loss / count
        mean.backward()
        self.state.finish_gradient()  # clips
        if self.state.scheduled:
            self.state.set_rate()
        self.optimizer.step()
        self.net.zero_grad()
        self.progress.count(self.opts.global_batch_size)
        self.trained = True

    def report(self, **metrics):
        pass
