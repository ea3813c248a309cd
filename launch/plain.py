"""The same program without this project: a plain loop in the place of Elastic.

Forward, backward, clip, step, in one process. What the project does to a program alike in each of its runs is
seen by nothing else. Order of samples, seeds and arguments are taken as they are.
"""

from contextlib import contextmanager

import torch

from common.data import Batch
from common.device import gpus
from common.sampler import ElasticSampler, seed
from common.training.evaluate import evaluate
from common.training.optimizer import groups_of, learning_rate, turns_of
from common.training.progress import Progress
from common.training.replicas import Called
from common.training.step import placed
from common.training.tasks import JUDGE, Task
from common.world import World
from launch.rehearsed import Watched


class Plain(Watched):
    """Has what a loop needs of Elastic."""

    stepped = True
    heartbeat = 0

    def __enter__(self):
        if not self.opts:
            self._read_arguments()
        self.shrink()
        self.cut()
        self.device = (*gpus(), torch.device("cpu"))[0]
        self.world = World(0, 1, 0, 1, (self.device,), "plain")
        self.parts = turns_of(self.optimizer)
        self.progress = Progress(self.opts, len(self.data.train), len(self.parts), self.shuffled)
        self.model = Called(self.net.to(self.device), self)  # casts, as --amp says
        if not any(module.training for module in self.net.modules()):
            self.net.train()
        self.still = [module for module in self.net.modules() if not module.training]
        self.train()
        self.tell()
        return self

    def __exit__(self, *error):
        self.note()

    def named(self):
        return self.net.state_dict()

    def train(self):
        self.net.train()
        for module in self.still:
            module.training = False

    @contextmanager
    def evaluating(self):
        self.net.eval()
        yield
        self.train()

    def epochs(self):
        while not self.progress.finished:
            yield self.watched(self.batches())
            self.progress.end_epoch()

    def batches(self):
        opts = self.opts
        progress = self.progress
        samples = self.data.train
        order = ElasticSampler(samples, opts.global_batch_size, seed=progress.order[1])
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
        part = self.parts[progress.turn]
        if opts.clip_grad_norm:
            weights = [p for group in part.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(weights, opts.clip_grad_norm)
        if self.schedule or opts.lr_schedule != "constant" or opts.warmup_epochs:
            rate = learning_rate(progress.planned, opts, progress.steps_per_epoch, self.schedule)
            for group in groups_of(self.optimizer):
                group["lr"] = rate * group.get("scale", 1.0)
        seed(opts.seed, "update", progress.step)
        part.step()
        self.net.zero_grad()
        progress.count(opts.global_batch_size)
        self.write(step=progress.step, row={"loss": mean.item()})

    def evaluate(self, judge):
        if not isinstance(judge, Task):
            judge = Task(lambda _, data, own=judge: own(Batch([([], data)], 0)), [], spec=JUDGE)
        return evaluate(self.model, self.data.test, self, self.world, judge)

    def mean(self, value, count=None):
        return float(value)

    def gather(self, tensor):
        return tensor.detach()

    def report(self, **metrics):
        row = {f"val_{name.removeprefix('val_')}": value for name, value in metrics.items()}
        self.progress.evaluated = {"step": self.progress.step}
        self.write(step=self.progress.step, row={} if self.opts.ema_decay else row)
