"""A checkpoint that no rank could hold alone: each writes the tensors it owns, the last one to finish makes one of them.

    .life-L/part-s0/step-N/     a checkpoint of stage 0's tensors, by its first replica (in a rescue: by any that lives)
    .life-L/part-s1/step-N/     stage 1's
    step-N/                     both, streamed into the one that train_ddp.py reads and writes too

Nobody waits for anybody and no collective is in the way: under the lock of the staging folder, whoever finds all parts of
its own step there joins them. A part that never comes leaves the checkpoint before in place. Reading, each rank takes what
it owns from the whole files, wherever the net is cut now. All ranks must see one run folder.
"""
import json
import os
import shutil
import time
from math import prod

import torch

from common import UserError
from common.agreement import send
from common.checkpoint import CheckpointStore
from common.fence import rescuing
from common.files import CHUNK, Damaged, opened, parse_json
from common.image import Image
from common.manifest import STATE, TENSORS, checkpoints, facts_to_json, folder_name, glance, is_there, verify
from common.restore import Found, newest, refuse_to_fall_back, take
from common.writer import Writer


class SpreadStore(CheckpointStore):
    """The store of a net in parts; of a whole net, the store that it extends."""

    def __init__(self, opts, world, *args, **kwargs):
        super().__init__(opts, world, *args, **kwargs)
        self.shared = opts.shard                                     # each replica has other rows of a tensor
        self.spread = world.stages > 1 or self.shared
        self.first = world.replica == 0
        self.folder = self.writer.staging / _part(world.stage, world.replica if self.shared else None)
        self.own = Writer(self.folder, self.folder / "aside", self.writer.marks)
        self.whole, self.parts, self.joined = {}, [], None

    @property
    def writes(self):
        return bool(self.fence) or self.spread and (self.first or self.shared)

    # ---- reading --------------------------------------------------------------------------------------------------
    def _load(self, choices, key):
        if not self.spread:
            return super()._load(choices, key)
        world = self.world
        with world.together(f"one folder {key}"):
            if self.fence and world.rank:
                raise UserError(f"--run-dir {self.run_dir}: rank {world.rank} does not see the folder of rank 0\n"
                                "a net in stages over machines needs one run folder that all of them share")
        self._learn()
        step, facts, skipped, unread = newest(choices if world.rank == 0 else [], self._read_whole, self.report)
        world.meet(f"read {key}")
        best, damaged = world.broadcast(torch.tensor([step, len(skipped)]), 0).tolist()
        refuse_to_fall_back(world, f"unread {key}", unread, best)
        if best >= 0:
            facts, folder = parse_json(send(world, facts and facts_to_json(facts), 0), STATE), dict(choices)[best]
            take(self.state, {part: Slices(folder / name, self.whole[part], self.images[part], self.before[part])
                              for part, name in TENSORS.items()}, facts, self.fingerprint, self.fence and self.report)
            world.meet(f"loaded {key}")                             # only now may rank 0 let anything go
            self.committed = best if key == "own" else -1
        return Found(best, step, facts, skipped, damaged)

    def _learn(self):
        """Names, types and shapes of the whole net: each rank tells what it holds, rank 0 of each stage first."""
        world, mine = self.world, {}
        for part, tensors in self.state.tensors().items():
            rows = self.state.sharded()
            mine[part] = {n: [str(t.dtype).removeprefix("torch."), list(t.shape), n in rows] for n, t in tensors.items()}
        told = [json.loads(send(world, json.dumps(mine).encode(), rank)) for rank in range(world.size)]
        self.before, holders = {}, {}
        for part in mine:
            whole, holders[part] = {}, {}
            self.before[part] = dict.fromkeys(mine[part], 0)
            for rank in sorted(range(world.size), key=lambda rank: (rank % world.stages, rank // world.stages)):
                for name, (dtype, shape, rows) in told[rank][part].items():
                    if rank // world.stages and not rows:
                        continue                                    # a copy of what the first replica has
                    if rank == world.rank:
                        self.before[part][name] = sum(size for _, size in holders[part].get(name, ()))
                    kind = getattr(torch, dtype)
                    holders[part].setdefault(name, []).append((rank, prod(shape) * kind.itemsize))
                    seen = whole.get(name)
                    whole[name] = (kind, [seen[1][0] + shape[0], *shape[1:]] if seen else shape)
            self.whole[part] = Image({n: torch.empty((), dtype=kind).expand(shape) for n, (kind, shape) in whole.items()})
        self.part = {name: shape for name, (_, _, _, shape) in self.whole["model"].places.items()}, self._own
        key = {rank: self.writer.staging / _part(rank % world.stages, rank // world.stages if self.shared else None)
               for rank in range(world.size)}
        self.parts = sorted({key[rank] for rank in key if self.shared or rank < world.stages})
        self.sources = {part: {n: [(key[rank], told[rank][part]) for rank, _ in found] for n, found in names.items()}
                        for part, names in holders.items()}

    def _read_whole(self, step, folder):
        _, facts = verify(step, folder)
        for part, name in TENSORS.items():
            with opened(folder / name) as fd:
                header = self.whole[part].header
                if os.fstat(fd).st_size != self.whole[part].size or os.read(fd, len(header)) != header:
                    raise Damaged(f"{name} is not that of this model and optimizer")
        return facts

    def _own(self, name, tensor):
        """What this rank owns of a whole weight."""
        _, _, dtype, shape = self.images["model"].places[name]
        start = self.before["model"][name] // dtype.itemsize
        return tensor.reshape(-1)[start:start + prod(shape)].view(shape)

    def agree(self, state):
        if not self.shared:                                         # a shard is like no other
            super().agree(state)

    # ---- writing --------------------------------------------------------------------------------------------------
    def overdue(self):
        """1.0 where this rank's clock asks for a save; summed over all ranks it is known to all."""
        wanted = self.fence and self.opts.save_seconds and time.monotonic() - self.saved_at >= self.opts.save_seconds
        return float(bool(wanted))

    def due(self, state, told):
        """Every stage saves at the same step: `told` is everybody's `overdue`."""
        every = self.opts.save_every
        return self.writes and bool(told or every and state.step % every == 0) and state.facts() != self.saved

    def rescue(self, state):
        """True: the newest whole step is on the disk; False: it was; a text: this rank has done its part of it.

        Whoever waited for the others with its gradient complete makes the next step too, and leaves its part of both: one
        of the others may have passed that wait, and then has only the next one; or one may lack it, and has only this one.
        """
        if not self.spread:
            return super().rescue(state)
        self.wait()
        self.writer.stage(state.step)
        with state.lock, self.background.busy:
            done = not state.torn and self._rescue_part(state)
            if state.complete and not state.torn:
                state.update(state.complete)
                state.torn = True                                   # the main thread may come to where it makes this step
                done = self._rescue_part(state)
            return done

    def _rescue_part(self, state):
        if is_there(self.root, state.facts()):
            return False
        facts = self._snapshot(state)
        self._write(facts)
        return self.joined == facts or (f"step {facts['step']}: this rank's part is written; it counts once every stage's is, "
                                        "until then the newest checkpoint stands")

    def _commit(self, facts):
        if not self.spread:
            return super()._commit(facts)
        self.writer.stage(facts["step"])
        with rescuing(self.writer.staging):
            for folder in (self.folder, self.own.staging):
                if not folder.is_dir():
                    os.mkdir(folder, 0o700)
            if not self._facts(self.folder, facts):
                self.own.commit(self.images, facts, -1)
            if all(found := [self._facts(folder, facts) for folder in self.parts]):
                record = max((part["record"] for part in found), key=lambda record: record.get("step", -1))
                name = folder_name(facts["step"])
                images = {part: Joined(self.whole[part], self.sources[part], name, file) for part, file in TENSORS.items()}
                self.committed = max((step for step, _ in checkpoints(self.root) if step < facts["step"]), default=-1)
                self.writer.commit(images, facts | {"record": record}, self.committed)
                self.committed, self.joined = facts["step"], facts
                for folder in self.parts:
                    shutil.rmtree(folder / name, ignore_errors=True)

    def _facts(self, folder, facts):
        """Those of the part in this folder, or None; whoever did not see the end of a step lacks its record."""
        try:
            found = glance(facts["step"], folder / folder_name(facts["step"]))
        except Damaged:
            return None
        return found if parse_json(facts_to_json(facts | {"record": found["record"]}), STATE) == found else None

    def _confirm(self, facts, before, began):
        if not self.spread or self.joined == facts:                 # whoever joined the parts looks after the whole
            super()._confirm(facts, before, began)


def _part(stage, replica):
    return f"part-s{stage}" + ("" if replica is None else f"r{replica}")


class Slices:
    """What this rank owns of a whole file, one tensor at a time: {name: tensor}, read when asked for."""

    def __init__(self, path, whole, own, before):
        self.path, self.whole, self.own, self.before = path, whole, own, before

    def __getitem__(self, name):
        at, (_, size, dtype, shape) = self.whole.places[name][0], self.own.places[name]
        data = bytearray(size)
        with open(self.path, "rb") as file:
            file.seek(len(self.whole.header) + at + self.before[name])
            if file.readinto(data) != size:
                raise Damaged(f"{self.path.name} ends within {name}")
        return torch.frombuffer(data, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


class Joined:
    """The bytes of a whole file, streamed from the parts; one chunk of it is in memory at a time."""

    def __init__(self, whole, sources, step, file):
        self.whole, self.sources, self.step, self.file = whole, sources, step, file

    @property
    def bytes(self):
        yield self.whole.header
        places = {}
        for name in self.whole.places:
            for folder, names in self.sources[name]:
                if folder not in places:
                    places[folder] = Image({n: torch.empty((), dtype=getattr(torch, dtype)).expand(shape)
                                            for n, (dtype, shape, _) in names.items()})
                part = places[folder]
                at, left = len(part.header) + part.places[name][0], part.places[name][1]
                with open(folder / self.step / self.file, "rb") as file:
                    file.seek(at)
                    while left:
                        piece = file.read(min(CHUNK, left))
                        if not piece:
                            raise Damaged(f"{folder.name}/{self.file} ends within {name}")
                        left -= len(piece)
                        yield piece
