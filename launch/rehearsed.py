"""A program in a rehearsal: as it is, on little data, with each step noted.

`Watched` stands in the place of Elastic. A life strikes, or differs, as its `does` says: {"kill": 6} in
step 6, {"stop": 8}, {"die": 15} in an evaluation; {"ulp": 1} moves each weight by one ulp a step,
{"quiet": 1} draws the same always; others are options.
"""

import os
import pickle
import signal
from dataclasses import replace

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

import common.elastic
from common.extras.rehearsed import rehearsal_key
from launch.compare import ROW, signs, sketch_of

STEPS = 20
WHOLE_BATCHES = 4  # of an epoch
SAMPLES = 11  # of a batch, or fewer
ULPS = {"off": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
DRAWS = {"rand", "uniform", "randn", "normal", "bernoulli", "randint", "exponential"}
OFF = dict.fromkeys(
    ["workers", "max_steps", "patience", "save_every", "save_seconds", "check_every", "tensorboard"], 0
)


class Watched(common.elastic.Elastic):
    """The loop, with notes of each step."""

    def _join(self):
        self.cut()
        super()._join()

    def _begin(self):
        super()._begin()
        self.tell()

    def cut(self):
        """To few samples, of which the last batch has fewer if that of the whole data has."""
        self.key = rehearsal_key(self.opts)
        if self.data is None:
            self.data = common.elastic.load_data(self.opts, self.sets)
        train, test = self.data.train, self.data.test
        size = min(self.opts.global_batch_size, SAMPLES)
        rest = len(train) % self.opts.global_batch_size
        train.count = min(len(train), WHOLE_BATCHES * size + min(rest, size // 2 + 1))
        test.count = min(len(test), 2 * size + 1)
        few = OFF | {"global_batch_size": size, "epochs": -(-STEPS // -(-train.count // size))}
        few |= {name: value for name, value in self.does.items() if hasattr(self.opts, name)}
        self.opts = replace(self.opts, log_every=1, eval_every=1, **few)

    # ---- notes ----
    def tell(self):
        """What is known before the first step."""
        facts = {
            "key": self.key,
            "opts": self.opts,
            "weights": {name for name, p in self.net.named_parameters() if p.is_floating_point()},
            "norms": any(isinstance(module, _BatchNorm) for module in self.net.modules()),
            "epoch": self.progress.steps_per_epoch,
        }
        self.write(facts)
        self.move()
        if "quiet" in self.does:
            Silence().__enter__()

    def write(self, facts, step=0):
        pickle.dump((step, facts), self.notes)
        self.notes.flush()

    def note(self, tensors):
        ulp = ULPS[self.opts.amp]
        sketches = {name: sketch_of(tensor, ulp) for name, tensor in tensors.items()}
        self.write(sketches, self.progress.step)

    def note_row(self, row):
        """Numbers of the log, which is rank 0's."""
        if self.world.rank == 0:
            self.note({ROW + name: torch.tensor([value], dtype=torch.float32) for name, value in row.items()})

    def move(self):
        """Each weight by one ulp, in a run that shows how far rounding leads."""
        ulp = ULPS[self.opts.amp]
        for p in self.net.parameters() if "ulp" in self.does else ():
            one = signs(p.numel()).view(p.shape).to(p.device)
            p.data.mul_(1 + max(ulp, torch.finfo(p.dtype).eps) * one)

    def _between_steps(self):
        tensors = self.state.tensors()
        self.note(tensors["model"] | tensors["optimizer"])
        self.note_row(self.progress.record)
        self.move()
        super()._between_steps()

    def report(self, **metrics):
        super().report(**metrics)
        self.note_row(self.progress.evaluated)

    # ---- what strikes ----
    def step(self, loss, count=None):
        step = self.progress.step + 1
        if step == self.does.get("stop"):
            signal.raise_signal(signal.SIGTERM)
        if step == self.does.get("kill"):
            self.strike()
        super().step(loss, count)

    def evaluate(self, judge):
        found = super().evaluate(judge)
        if self.progress.step >= self.does.get("die", STEPS + 1):
            self.strike()
        return found

    def strike(self):
        """Kills the last process."""
        self.store.saver.wait()
        if self.world.rank == self.world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Silence(TorchDispatchMode):
    """In it torch draws the same number always, and drops nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **kwargs or {})
        kind = name.removesuffix("_").removesuffix("_like")
        return out.fill_(0.5) if kind in DRAWS else out
