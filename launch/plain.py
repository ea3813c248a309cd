"""The same program without this project: a plain loop in the place of Elastic.

Forward, backward, clip, step, in one process. What the project does to a program alike in each of its runs is
seen by nothing else. Order of samples, seeds, modes and arguments are taken as they are.
"""

from contextlib import contextmanager
from dataclasses import replace

import torch

from common.data import Batch, batches
from common.device import gpus
from common.extras.schedules import learning_rate
from common.options import extra
from common.sampler import ElasticSampler, seed
from common.training.modes import Modes
from common.training.optimizer import groups_of, turns_of
from common.training.progress import Progress
from common.training.replicas import Called
from common.training.step import placed
from common.world import World
from launch.rehearsed import Watched


class Plain(Watched):
    """Has what a loop needs of Elastic."""

    stepped = True
    in_batch = False
    gradient = None
    heartbeat = 0

    def __enter__(self):
        if not self.opts:
            self.opts = extra("arguments")(self)
        self.cut()
        self.device = (*gpus(), torch.device("cpu"))[0]
        self.world = World(0, 1, 0, 1, (self.device,), "plain")
        self.parts = turns_of(self.optimizer)
        self.progress = Progress(self.opts, len(self.data.train), len(self.parts), self.shuffled)
        self.model = Called(self.net.to(self.device), self)  # casts, as --amp says
        self.modes = Modes(self.net)
        self.state = self  # of an evaluation
        self.tell()
        return self

    def __exit__(self, *error):
        pass

    def _end_step(self):
        pass

    def named(self):
        return self.net.state_dict()

    @contextmanager
    def evaluating(self):
        self.net.eval()
        yield
        self.modes.train()

    def epochs(self):
        while not self.progress.finished:
            yield self.batches()
            self.progress.end_epoch()

    def batches(self):
        opts = replace(self.opts, micro_batch_size=0, virtual_ranks=0)
        progress = self.progress
        order = ElasticSampler(self.data.train, opts.global_batch_size, seed=progress.order[1])
        order.set_epoch(progress.epoch, progress.position)
        for batch in batches(self.data.train, order, opts):
            parts = [(batch.ids, placed(batch.data, self.device, opts))]
            for _ in self.parts:
                seed(opts.seed, "step", progress.step - progress.turn, 0)
                yield Batch(parts, batch.size)
                self.note()

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
        progress.record = {"step": progress.step, "loss": mean.item()}

    def report(self, **metrics):
        row = {f"val_{name.removeprefix('val_')}": value for name, value in metrics.items()}
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        self.progress.evaluated = {"step": self.progress.step}
        if not self.opts.ema_decay:
            self.note_row(self.progress.evaluated | numbers)
