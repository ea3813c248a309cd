"""The same program without this project: a plain loop in the place of Elastic.

Forward, backward, clip, step, in one process. What the project does to a program alike in each of its runs is
seen by nothing else. Order of samples, seeds and arguments are taken as they are.
"""

from contextlib import nullcontext

import torch
from common.training.turns import Turns

import common.data.samples
from common.data import Batch
from common.device import gpus
from common.sampler import ElasticSampler, seed
from common.training.evaluate import evaluate
from common.training.optimizer import learning_rate
from common.training.progress import Progress
from common.training.replicas import Called
from common.training.step import placed
from common.training.tasks import Task
from common.world import World
from launch.rehearsed import Watched


class Plain(Watched):
    """Has what a loop needs of Elastic."""

    stepped = True
    heartbeat = 0
    averaged = nullcontext  # --ema-decay is not compared

    def __enter__(self):
        if not self.opts:
            self._read_arguments()
        self.shrink()
        self.cut()
        self.device = (*gpus(), torch.device("cpu"))[0]
        self.world = World(0, 1, 0, 1, (self.device,), "plain")
        self.parts = self.optimizer.order if isinstance(self.optimizer, Turns) else [self.optimizer]
        self.progress = Progress(self.opts, len(self.data.train), len(self.parts))
        self.model = Called(self.net.to(self.device), self)  # casts, as --amp says
        if not any(module.training for module in self.net.modules()):
            self.net.train()
        self.evaluating = [module for module in self.net.modules() if not module.training]
        self.train()
        self.tell()
        return self

    def __exit__(self, *error):
        self.note()

    def named(self):
        return self.net.state_dict()

    def train(self):
        self.net.train()
        for module in self.evaluating:
            module.training = False

    def epochs(self):
        while not self.progress.finished:
            yield self.watched(self.batches())
            self.progress.end_epoch()

    def batches(self):
        opts = self.opts
        progress = self.progress
        samples = self.data.train
        order = ElasticSampler(samples, opts.global_batch_size, seed=opts.seed)
        order.set_epoch(progress.epoch, progress.position)
        if samples.set_epoch:
            samples.set_epoch(progress.epoch)
        for ids in order:
            data = samples.fetch(ids, progress.epoch, opts.augment != "none")
            for _ in self.parts:
                seed(opts.seed, "step", progress.step - progress.turn, 0)
                yield Batch([(ids, placed(data, self.device, opts))], len(ids))

    def step(self, loss, count=None):
        opts = self.opts
        progress = self.progress
        if isinstance(loss, dict):
            loss, count = next(iter(loss.values()))
        mean = loss if count is None else loss / count
        mean.backward()
        if opts.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), opts.clip_grad_norm)
        scheduled = self.schedule or opts.lr_schedule != "constant" or opts.warmup_epochs
        rate = learning_rate(progress.step, opts, progress.steps_per_epoch, self.schedule)
        for group in self.optimizer.param_groups:
            if scheduled or not progress.step and "scale" in group:
                group["lr"] = rate * group.get("scale", 1.0)
        seed(opts.seed, "update", progress.step)
        self.parts[progress.turn].step()
        self.net.zero_grad()
        progress.count(opts.global_batch_size)
        self.write(step=progress.step, row={"loss": mean.item()})

    def evaluate(self, judge):
        if not isinstance(judge, Task):
            judge = Task(lambda _, data, own=judge: own(Batch([([], data)], 0)), [], spec="judge")
        found = evaluate(self.model, self.data.test, self, self.world, judge)
        self.train()
        return found

    def report(self, **metrics):
        row = {f"val_{name.removeprefix('val_')}": value for name, value in metrics.items()}
        self.progress.evaluated = {"step": self.progress.step}
        self.write(step=self.progress.step, row={} if self.opts.ema_decay else row)


def keep_floats():
    """Numbers of float64 that float32 has not stay as they are."""
    convert = common.data.samples.as_input

    def as_input(x):
        exact = x.dtype != torch.float64 or torch.equal(x.float().double(), x)
        return convert(x) if exact else x

    common.data.samples.as_input = as_input
