"""What a process of a rehearsal does: the program as it is, on little data, with each step noted.

From a fork to its end: `live` puts Watched, or Plain, in the place of Elastic and starts the script. A life
strikes, or differs, as its `does` says: {"kill": 6} in step 6, {"stop": 8}, {"die": 15} in an evaluation;
{"ulp": 1} moves each weight by one ulp a step, {"reverse": 1} turns the samples of each share round,
{"quiet": 1} draws the same always, {"freeze": 1} leaves batch norms as in an evaluation; others are options.
"""

import atexit
import os
import pickle
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

import common.elastic
from common import errors
from common.extras.rehearsed import rehearsal_key
from common.sampler import ElasticSampler
from launch.compare import sketch_of
from launch.worker import work

STEPS = 20
EPOCH_STEPS = 5  # the last one with fewer samples, if it is so in the whole data
SAMPLES = 11  # of a batch, or fewer
ULPS = {"off": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
SILENT = {
    "rand": 0.5,
    "uniform": 0.5,
    "randn": 0,
    "normal": 0,
    "bernoulli": 1,
    "randint": 0,
    "exponential": 1,
}
OFF = dict.fromkeys(
    ["workers", "max_steps", "patience", "save_every", "save_seconds", "check_every", "tensorboard"], 0
)


class Watched(common.elastic.Elastic):
    """The loop, with notes of each step."""

    def _join(self):
        self.shrink()
        super()._join()

    def _begin(self):
        self.cut()
        super()._begin()
        self.tell()

    # ---- little data ----
    def shrink(self):
        self.key = rehearsal_key(self.opts)
        self.whole_batch = self.opts.global_batch_size
        few = {"global_batch_size": min(self.whole_batch, SAMPLES)}
        few |= {name: value for name, value in self.does.items() if hasattr(self.opts, name)}
        self.opts = replace(self.opts, log_every=1, eval_every=1, **OFF | few)

    def cut(self):
        if self.data is None:
            self.data = common.elastic.load_data(self.opts, self.sets)
        size = self.opts.global_batch_size
        whole, rest = divmod(len(self.data.train), self.whole_batch)
        whole = min(whole, EPOCH_STEPS - 1)
        rest = min(rest, size // 2 + 1 if whole else size)
        self.data.train.count = whole * size + rest
        self.data.test.count = min(len(self.data.test), 2 * size + 1)
        self.opts = replace(self.opts, epochs=-(-STEPS // (whole + (rest > 0))))

    # ---- notes ----
    def write(self, **facts):
        pickle.dump(facts, self.notes)
        self.notes.flush()

    def tell(self):
        self.noted = self.progress.step or -1  # what a life begins with may be noted before its epoch's end
        self.norms = [module for module in self.net.modules() if isinstance(module, _BatchNorm)]
        self.write(
            key=self.key,
            weights={name for name, p in self.net.named_parameters() if p.is_floating_point()},
            norms=bool(self.norms),
            script=self.opts.script,
            slices=self.opts.virtual_ranks,
            pieces=self.opts.micro_batch_size,
            epoch=self.progress.steps_per_epoch,
        )

    def named(self):
        tensors = self.state.tensors()
        return tensors["model"] | tensors["optimizer"]

    def note(self):
        """After each step, and before the first one of a life."""
        step = self.progress.step
        if step == self.noted:
            return
        self.noted = step
        ulp = ULPS[self.opts.amp]
        self.write(step=step, named={name: sketch_of(tensor, ulp) for name, tensor in self.named().items()})
        if "ulp" in self.does:
            draws = torch.Generator().manual_seed(step)
            for p in self.net.parameters():
                signs = torch.randint(0, 2, p.shape, generator=draws).to(p.device) * 2 - 1
                p.data.mul_(1 + max(ulp, torch.finfo(p.dtype).eps) * signs)

    # ---- the loop ----
    def epochs(self):
        for epoch in super().epochs():
            yield self.watched(epoch)

    def watched(self, epoch):
        self.note()
        for batch in epoch:
            self.note()
            step = self.progress.step + 1
            if step == self.does.get("stop"):
                signal.raise_signal(signal.SIGTERM)
            if step == self.does.get("kill"):
                self.strike()
            for norm in self.norms if "freeze" in self.does else ():
                norm.training = False
            with Silence() if "quiet" in self.does else nullcontext():
                yield batch
        self.note()

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
        return out.fill_(SILENT[kind]) if kind in SILENT else out


def begin(opts):
    """Takes the place of the script's own, which looks whether the user's run is complete."""
    common.elastic.pin(opts)
    return True


def live(command, environment, folder, number, does):
    """A process from its fork to its end."""
    from launch.plain import Plain

    atexit._clear()
    errors.OTHER_RANKS_SECONDS = 0.0  # no agent ends them
    place = f"{number} {environment['RANK']}"
    sys.stdout = sys.stderr = open(folder / f"said {place}", "w", buffering=1)
    Watched.does = does | {"run_dir": folder / "run"}
    Watched.notes = open(folder / f"notes {place}", "wb")
    common.elastic.begin = begin
    common.elastic.Elastic = Plain if "plain" in does else Watched
    if "reverse" in does:
        inner = ElasticSampler.__iter__
        ElasticSampler.__iter__ = lambda order: (ids[::-1] for ids in inner(order))
    work(command, environment, [])
