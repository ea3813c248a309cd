"""A checkpoint that no rank could hold alone: each writes the tensors it owns, the last one to finish makes
one of them.

    .life-L/part-s0/step-N/     a checkpoint of stage 0's tensors, by its first replica (in a rescue: by any that lives)
    .life-L/part-s1/step-N/     stage 1's
    step-N/                     both, streamed into the one that train_ddp.py reads and writes too

Nobody waits for anybody and no collective is in the way: under the lock of the staging folder, whoever finds
all parts of its own step there joins them. A part that never comes leaves the checkpoint before in place.
Reading, each rank takes what it owns from the whole files, wherever the net is cut now. All ranks must see
one run folder.
"""
import contextlib
import json
import os
import shutil
import time
from math import prod

import torch

from common.checkpoint.commit import Writer
from common.checkpoint.files import Damaged, opened, parse_json, patient
from common.checkpoint.load import Found, newest, refuse_to_fall_back, take
from common.checkpoint.manifest import STATE, TENSORS, checkpoints, facts_to_json, folder_name, glance, is_there, verify
from common.checkpoint.pieces import Digests, Joined, Slices
from common.checkpoint.store import CheckpointStore
from common.checkpoint.tensor_file import TensorFile
from common.errors import UserError
from common.world import progress, send


class PartsStore(CheckpointStore):
    """The store of a net in parts; of a whole net, the store that it extends."""

    def __init__(self, opts, world, *args, **kwargs):
        super().__init__(opts, world, *args, **kwargs)
        self.shared = opts.shard  # each replica has other rows of a tensor
        self.spread = world.stages > 1 or self.shared
        self.first = world.replica == 0
        self.folder = self.writer.staging / _part(world.stage, world.replica if self.shared else None)
        self.own = Writer(self.folder, self.folder / "aside", self.writer.marks)
        self.own._move = self.writer._move  # one counter tells whether the disk moves
        self.whole, self.parts, self.joined = {}, [], None

    @property
    def writes(self):
        return bool(self.fence) or self.spread and (self.first or self.shared)

    # ---- reading ----------------------------------------------------------------------------------
    def _load(self, choices, key):
        if not self.spread:
            return super()._load(choices, key)
        world = self.world
        with world.all_or_none(f"one folder {key}"):
            if self.fence and world.rank:
                raise UserError(f"--run-dir {self.run_dir}: rank {world.rank} does not see the folder of rank 0\n"
                                "a net in stages over machines needs one run folder that all of them share")
        self._learn()
        digests = {part: Digests(whole) for part, whole in self.whole.items()}
        step, facts, skipped, unread = newest(choices if world.rank == 0 else [], self._read_whole(digests), self.report)
        world.barrier(f"read {key}")
        best, damaged = world.broadcast(torch.tensor([step, len(skipped)]), 0).tolist()
        refuse_to_fall_back(world, f"unread {key}", unread, best)
        if best >= 0:
            facts, folder = parse_json(send(world, facts and facts_to_json(facts), 0), STATE), dict(choices)[best]
            found = {part: send(world, digests[part].found, 0) for part in TENSORS}
            with world.all_or_none(f"loaded {key}"):  # only then may rank 0 let anything go
                self._take(folder, facts, found)
            self.committed = best if key == "own" else -1
        return Found(best, step, facts, skipped, damaged)

    def _learn(self):
        """Names, types and shapes of the whole net: each rank tells what it holds, rank 0 of each stage
        first.
        """
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
                        continue  # a copy of what the first replica has
                    if rank == world.rank:
                        self.before[part][name] = sum(size for _, size in holders[part].get(name, ()))
                    kind = getattr(torch, dtype)
                    holders[part].setdefault(name, []).append((rank, prod(shape) * kind.itemsize))
                    seen = whole.get(name)
                    whole[name] = (kind, [seen[1][0] + shape[0], *shape[1:]] if seen else shape)
            self.whole[part] = TensorFile({n: torch.empty((), dtype=kind).expand(shape) for n, (kind, shape) in whole.items()})
        self.part = {name: shape for name, (_, _, _, shape) in self.whole["model"].places.items()}, self._own
        key = {rank: self.writer.staging / _part(rank % world.stages, rank // world.stages if self.shared else None)
               for rank in range(world.size)}
        self.parts = sorted({key[rank] for rank in key if self.shared or rank < world.stages})
        self.sources = {part: {n: [(key[rank], told[rank][part]) for rank, _ in found] for n, found in names.items()}
                        for part, names in holders.items()}

    def _read_whole(self, digests):
        """What `newest` reads with: every byte once, for the manifest's hashes and for those of the pieces.
        """
        moved, name_of = progress(self.world.store), {name: part for part, name in TENSORS.items()}

        def seen(name, at, data):
            moved()
            if name in name_of:
                digests[name_of[name]](at, data)

        def read(step, folder):
            manifest, facts = verify(step, folder, seen=seen)
            for part, name in TENSORS.items():
                if manifest["files"][name]["bytes"] != self.whole[part].size or not digests[part].fits():
                    raise Damaged(f"{name} is not that of this model and optimizer")
            return facts
        return read

    def _take(self, folder, facts, digests):
        """What this rank owns, compared with what rank 0 has verified: another machine's cache or memory may
        give other bytes.
        """
        moved = progress(self.world.store)

        @patient
        def load():
            with contextlib.ExitStack() as stack:
                slices = {part: Slices(stack.enter_context(opened(folder / name)), name, self.whole[part], self.images[part],
                                       self.before[part], digests[part], moved) for part, name in TENSORS.items()}
                take(self.state, slices, facts, self.fingerprint, self.fence and self.report)

        try:
            load()
        except (Damaged, OSError) as error:
            raise UserError(f"rank {self.world.rank} does not read {folder} as rank 0 did: {error}\n"
                            "start again, it is verified anew; if this comes back, look at that machine's disk and memory",
                            code=1) from error

    def _own(self, name, tensor):
        """What this rank owns of a whole weight."""
        _, _, dtype, shape = self.images["model"].places[name]
        start = self.before["model"][name] // dtype.itemsize
        return tensor.reshape(-1)[start:start + prod(shape)].view(shape)

    def agree(self, state):
        if not self.shared:  # a shard is like no other
            super().agree(state)

    # ---- writing ----------------------------------------------------------------------------------
    def overdue(self):
        """1.0 where this rank's clock asks for a save; summed over all ranks it is known to all."""
        wanted = self.fence and self.opts.save_seconds and time.monotonic() - self.saved_at >= self.opts.save_seconds
        return float(bool(wanted))

    def due(self, state, told):
        """Every stage saves at the same step: `told` is everybody's `overdue`."""
        every = self.opts.save_every
        return self.writes and bool(told or every and state.step % every == 0) and state.facts() != self.saved

    def rescue(self, state):
        """True: the newest whole step is on the disk; False: it was; a text: this rank has done its part of
        it.

        Whoever waited for the others with its gradient complete makes the next step too, and leaves its part
        of both: one of the others may have passed that wait, and then has only the next one; or one may lack
        it, and has only this one.
        """
        if not self.spread:
            return super().rescue(state)
        with self.writer.rescuing(state.step):
            self.wait(hurry=True)
            return self._rescue_parts(state)

    def _rescue_parts(self, state):
        with state.lock, self.background.busy:
            done = not state.half_updated and self._rescue_part(state)
            if state.ready and not state.half_updated:
                state.update(state.ready)
                state.half_updated = True  # the main thread may come to where it makes this step
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
        with self.writer.rescuing(facts["step"]):
            for folder in (self.folder, self.own.staging):
                if not folder.is_dir():
                    os.mkdir(folder, 0o700)
            if not self._facts(self.folder, facts):
                self.own.commit(self.images, facts, -1)
            if all(found := [self._facts(folder, facts) for folder in self.parts]):
                record = max((part["record"] for part in found), key=lambda record: record.get("step", -1))
                name = folder_name(facts["step"])
                images = {part: Joined(self.whole[part], self.sources[part], facts["step"], file) for part, file in TENSORS.items()}
                self.committed = max((step for step, _ in checkpoints(self.root) if step < facts["step"]), default=-1)
                self.writer.commit(images, facts | {"record": record}, self.committed)
                self.committed, self.joined = facts["step"], facts
                for folder in self.parts:
                    shutil.rmtree(folder / name, ignore_errors=True)

    def _facts(self, folder, facts):
        """Those of the part in this folder, or None; whoever did not see the end of a step lacks its record.
        """
        try:
            found = glance(facts["step"], folder / folder_name(facts["step"]))
        except Damaged:
            return None
        return found if parse_json(facts_to_json(facts | {"record": found["record"]}), STATE) == found else None

    def _confirm(self, facts, before, began):
        if not self.spread or self.joined == facts:  # whoever joined the parts looks after the whole
            super()._confirm(facts, before, began)


def _part(stage, replica):
    return f"part-s{stage}" + ("" if replica is None else f"r{replica}")
