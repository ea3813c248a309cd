"""The same program without this project: a plain loop in the place of Elastic.

Forward, backward, clip, step, in one process. What the project does to a program alike in each of its runs is
seen by nothing else. Order of samples, seeds, modes and arguments are taken as they are. Weights are compared
alone: of an evaluation, what it leaves in them.
"""

from contextlib import contextmanager
from dataclasses import replace

import torch

from common.data import Batch, batches
from common.extras.schedules import learning_rate
from common.options import extra
from common.sampler import ElasticSampler, seed
from common.training.modes import Modes
from common.training.optimizer import groups_of, turns_of, weights_of
from common.training.progress import Progress
from common.training.replicas import Called
from common.training.step import placed
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
        self._join()
        self.device = self.world.device
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
                self.note(self.net.state_dict())

    def step(self, loss, count=None):
        opts = self.opts
        progress = self.progress
        if isinstance(loss, dict):
            loss, count = next(iter(loss.values()))
        mean = loss if count is None else loss / count
        mean.backward()
        part = self.parts[progress.turn]
        if opts.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(weights_of(part), opts.clip_grad_norm)
        if self.schedule or opts.lr_schedule != "constant" or opts.warmup_epochs:
            rate = learning_rate(progress.planned, opts, progress.steps_per_epoch, self.schedule)
            for group in groups_of(self.optimizer):
                group["lr"] = rate * group.get("scale", 1.0)
        seed(opts.seed, "update", progress.step)
        part.step()
        self.net.zero_grad()
        progress.count(opts.global_batch_size)

    def report(self, **metrics):
        pass
