"""step: the state before a step is rebuilt in this process, and the step looked at slice by slice."""
import code
import contextlib
import math
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_hook

from common.checkpoint import CheckpointStore
from common.data import batches, load_data
from common.errors import UserError, say
from common.models import build_model
from common.options import parse_options
from common.replay.run import Run
from common.sampler import ElasticSampler
from common.training import TrainState, build_optimizer, find_task, placed, prepare
from common.training import seed as seed_step
from common.world import join, leave

SHOWN = 5  # largest tensors and losses


def step(given):
    """Prints what the step does, sample by sample, and keeps it (--dump) or opens a prompt (--break)."""
    if given.dump and not given.dump.absolute().parent.is_dir():
        raise UserError(f"--dump {given.dump}: there is no such folder\nname a file in a folder that exists")
    with tempfile.TemporaryDirectory() as scratch, \
            contextlib.closing(Again(Run(given.run), given.step, scratch)) as again:
        state, net = again.state, again.net
        again.order.set_epoch(state.epoch, state.position)
        batch = next(iter(batches(again.data.train, again.order, again.opts)))
        found = list(again.slices(batch))
        say(f"step {given.step}: epoch {state.epoch + 1}, position {state.position}, {batch.size} samples, "
            f"lr {state.rate(state.planned):.3g}")
        _tell_largest("weights", {name: p.abs().max().item() for name, p in net.named_parameters()})
        for each in found:
            say(f"slice {each['slice']}: loss {each['loss']:.4f}, samples {', '.join(map(str, each['ids']))}")
            norms = {name: gradient.norm().item() for name, gradient in each["gradients"].items()}
            _tell_largest(f"gradient {math.hypot(*norms.values()):.4g}", norms)
        for loss, id, about in sorted(_alone(again, batch.ids), reverse=True)[:SHOWN]:
            say(f"sample {id}: loss {loss:.4f}{about}")
        if given.dump:
            torch.save({"step": given.step, "lr": state.rate(state.planned), "batch": batch.parts,
                        "slices": found, "state": state.tensors()}, given.dump)
            say(f"{given.dump}: batch, outputs and gradients of each slice, and the state before the step")
        if getattr(given, "break"):
            code.interact("net, batch, state, found", local=locals())
    return 0


def _tell_largest(what, numbers):
    largest = Counter(numbers).most_common(SHOWN)
    say(f"  {what}, the largest: {', '.join(f'{name} {number:.3g}' for name, number in largest)}")


@torch.no_grad()
def _alone(again, ids):
    """(loss, id, class and file where the dataset tells them) of each sample, without dropout."""
    again.net.eval()
    listed = getattr(getattr(again.data.train, "dataset", None), "samples", None)  # as in an imagefolder
    for id in ids:
        part = placed(again.data.train.fetch([id]), again.world.device, again.opts)
        if part is not None:  # a bad sample that is skipped
            loss, count = again.state.task(again.net, part, again.state)[again.state.task.names[0]]
            label = part[1] if isinstance(part, (tuple, list)) and len(part) == 2 else None
            one = torch.is_tensor(label) and label.numel() == 1 and not label.is_floating_point()
            file = listed[id][0] if isinstance(listed, list) and isinstance(listed[id], tuple) else None
            yield loss.item() / max(1.0, float(count)), id, (f"  class {label.item()}" if one else "") + (
                f"  {file}" if isinstance(file, (str, Path)) else "")


class Again:
    """The run as it was just before step `before`, alone in this process."""

    def __init__(self, run, before, scratch):
        begin = max((step for step in run.steps if step < before), default=None)
        if begin is None or before > run.steps[-1]:
            raise UserError(f"step {before} does not lie between two of those that {run.folder} keeps\n"
                            f"it keeps {', '.join(map(str, run.steps))}")
        flags = [*run.flags("ddp"), f"--run-dir={scratch}/run"]
        if begin < before - 1:
            run, begin = run.again(begin, before - 1, f"{scratch}/before")[0], before - 1
        flags.append(f"--resume={run.kept.get(begin, 'auto')}")
        opts = self.opts = parse_options(None, flags, script="ddp")
        world = self.world = join(opts)  # and what follows in train_ddp.py
        self.data = load_data(opts, world)
        self.order = ElasticSampler(self.data.train, opts.global_batch_size, seed=opts.seed,
                                    slices=opts.virtual_ranks)
        task = find_task(opts)
        self.net = prepare(build_model(opts, self.data), opts, world, self.data, task)
        self.state = TrainState(self.net, build_optimizer(self.net, opts), opts, len(self.data.train),
                                order=self.order.name, task=task)
        self.store = CheckpointStore(opts, world, self.data.fingerprint, report=lambda text: None)
        self.store.restore(self.state)
        self.net.train()

    def close(self):
        self.store.close()
        self.store.release()
        leave(self.world)

    def slices(self, batch):
        """Yields a dict per slice of the step (without --virtual-ranks per forward), and leaves no trace.

        loss: the mean; outputs: of each module, in the order of the calls; gradients: by tensor.
        """
        ids, names = iter(batch.ids), {module: name for name, module in self.net.named_modules()}
        for number, (count, part) in enumerate(batch.parts):
            if self.opts.virtual_ranks or not number:
                seed_step(self.world, self.opts.seed, "step", self.state.step, number)
            if not count:
                continue
            outputs, part = {}, placed(part, self.world.device, self.opts, own=True)
            with register_module_forward_hook(lambda m, x, y, to=outputs: to.setdefault(names.get(m), y)):
                found = self.state.task(self.net, part, self.state)
            loss, size = found[self.state.task.names[0]]
            self.net.zero_grad(set_to_none=True)
            (loss / batch.size).backward()
            yield {"slice": number, "ids": [next(ids) for _ in range(count)],
                   "loss": loss.item() / max(1.0, float(size)),
                   "outputs": {name: y.detach() for name, y in outputs.items() if torch.is_tensor(y)},
                   "gradients": {n: p.grad for n, p in self.net.named_parameters() if p.grad is not None}}
            self.net.zero_grad(set_to_none=True)
            self.state.buffers.restore()
