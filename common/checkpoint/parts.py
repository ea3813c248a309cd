"""A checkpoint of a net split over ranks: each writes its own tensors, the last to finish joins the parts.

    .life-L/part-s0/step-N/     stage 0's tensors, by its first replica (in a rescue: by any that lives)
    .life-L/part-s1/step-N/     stage 1's tensors
    step-N/                     both, joined into one checkpoint that train_ddp.py reads too

No rank waits for another, and there is no collective: under the lock of the staging folder, a rank that finds
all parts of its step joins them. If a part never comes, the checkpoint before stays the newest.
To load, each rank reads what it owns from the whole files. All ranks must see one run folder.
"""
import contextlib
import json
import os
import shutil
from collections.abc import Callable
from math import prod

import torch

from common.checkpoint.commit import Writer
from common.checkpoint.files import Damaged, opened, patient
from common.checkpoint.handover import Handover
from common.checkpoint.load import Found, newest, refuse_to_fall_back, send_facts, take
from common.checkpoint.manifest import TENSORS, as_read, checkpoints, folder_name, glance, is_there, verify
from common.checkpoint.pieces import Digests, Joined, Slices
from common.checkpoint.store import CheckpointStore
from common.checkpoint.tensor_file import TensorFile
from common.errors import UserError, say
from common.ledger import Ledger
from common.options import Options
from common.world import World, progress, send


def open_store(opts: Options, world: World, fingerprint: str = "", ledger: Ledger | None = None,
               report: Callable[[str], None] = say) -> CheckpointStore:
    """The store of this run: a PartsStore where each rank holds a part of the net."""
    chosen = PartsStore if world.stages > 1 or opts.shard else CheckpointStore
    return chosen(opts, world, fingerprint, ledger, report)


class PartsStore(CheckpointStore):
    """The store of a net that is split over ranks."""

    def __init__(self, opts, world, *args, **kwargs):
        super().__init__(opts, world, *args, **kwargs)
        self.shared = opts.shard  # each replica has other rows of a tensor
        self.handover = Handover("off")  # a machine may have only some of the parts
        self.first = world.replica == 0
        self.folder = self.writer.staging / _part(world.stage, world.replica if self.shared else None)
        self.own = Writer(self.folder, self.folder / "aside", self.writer.marks)
        self.own._move = self.writer._move  # one counter tells whether the disk moves
        self.whole, self.parts, self.joined = {}, [], None

    @property
    def writes(self):
        return bool(self.fence or self.first or self.shared)

    # ---- reading ----------------------------------------------------------------------------------
    def _load(self, choices, key):
        world = self.world
        with world.all_or_none(f"one folder {key}"):
            if self.fence and world.rank:
                raise UserError(
                    f"--run-dir {self.run_dir}: rank {world.rank} does not see the folder of rank 0\n"
                    "a net in stages over machines needs one run folder that all of them share")
        self._learn()
        digests = {part: Digests(whole) for part, whole in self.whole.items()}
        step, facts, skipped, unread = newest(choices if world.rank == 0 else [], self._read_whole(digests),
                                              self.report)
        world.barrier(f"read {key}")
        best, damaged = world.broadcast(torch.tensor([step, len(skipped)]), 0).tolist()
        refuse_to_fall_back(world, f"unread {key}", unread, best)
        if best >= 0:
            facts = send_facts(world, facts, 0)
            found = {part: send(world, digests[part].found, 0) for part in TENSORS}
            with world.all_or_none(f"loaded {key}"):  # only then may rank 0 let anything go
                self._take(dict(choices)[best], facts, found)
            self.committed = best if key == "own" else -1
        return Found(best, step, facts, skipped, damaged)

    def _learn(self):
        """Names, types and shapes of the whole net: each rank tells what it holds."""
        world, mine = self.world, {}
        for part, tensors in self.state.tensors().items():
            rows = self.state.sharded()
            mine[part] = {n: [str(t.dtype).removeprefix("torch."), list(t.shape), n in rows]
                          for n, t in tensors.items()}
        told = [json.loads(send(world, json.dumps(mine).encode(), rank)) for rank in range(world.size)]
        self.before, holders = {}, {}
        for part in mine:
            whole, holders[part] = {}, {}
            self.before[part] = dict.fromkeys(mine[part], 0)
            for rank in sorted(range(world.size), key=lambda rank: divmod(rank, world.stages)[::-1]):
                for name, (dtype, shape, rows) in told[rank][part].items():
                    if rank // world.stages and not rows:
                        continue  # a copy of what the first replica has
                    if rank == world.rank:
                        self.before[part][name] = sum(size for _, size in holders[part].get(name, ()))
                    kind = getattr(torch, dtype)
                    holders[part].setdefault(name, []).append((rank, prod(shape) * kind.itemsize))
                    seen = whole.get(name)
                    whole[name] = (kind, [seen[1][0] + shape[0], *shape[1:]] if seen else shape)
            self.whole[part] = TensorFile({n: torch.empty((), dtype=kind).expand(shape)
                                           for n, (kind, shape) in whole.items()})
        replicas = [rank // world.stages if self.shared else None for rank in range(world.size)]
        key = {rank: self.writer.staging / _part(rank % world.stages, replica)
               for rank, replica in enumerate(replicas)}
        self.parts = sorted({key[rank] for rank in key if self.shared or rank < world.stages})
        self.sources = {part: {n: [(key[rank], told[rank][part]) for rank, _ in found]
                               for n, found in names.items()} for part, names in holders.items()}

    def _read_whole(self, digests):
        """The `read` of `newest`: each byte once, for the manifest's hashes and for those of the pieces."""
        moved, name_of = progress(self.world.store), {name: part for part, name in TENSORS.items()}

        def seen(name, at, data):
            digests[name_of[name]](at, data)

        def read(step, folder):
            manifest, facts = verify(step, folder, seen, moved=moved)
            for part, name in TENSORS.items():
                if manifest["files"][name]["bytes"] != self.whole[part].size or not digests[part].fits():
                    raise Damaged(f"{name} is not that of this model and optimizer")
            return facts
        return read

    def _take(self, folder, facts, digests):
        """Loads what this rank owns, and compares it with what rank 0 has verified.

        The cache or the memory of another machine may give other bytes.
        """
        moved = progress(self.world.store)

        @patient
        def load():
            with contextlib.ExitStack() as stack:
                slices = {part: Slices(stack.enter_context(opened(folder / name)), name, self.whole[part],
                                       self.images[part], self.before[part], digests[part], moved)
                          for part, name in TENSORS.items()}
                take(self.state, slices, facts, self.fingerprint, self.fence and self.report)

        try:
            load()
        except (Damaged, OSError) as error:
            raise UserError(f"rank {self.world.rank} does not read {folder} as rank 0 did: {error}\n"
                            "start again: it is verified anew; if this returns, check that machine's disk "
                            "and memory", code=1) from error

    def agree(self, state):
        if not self.shared:  # a shard is like no other
            super().agree(state)

    # ---- writing ----------------------------------------------------------------------------------
    def rescue(self, state, in_memory=False):
        """True: this rank saved the newest whole step; False: it was saved; a text: only its part is saved.

        A rank that dies waiting with a complete gradient saves its part of this step and of the next one
        (which it can make alone): ranks that had passed the wait have only the next step, ranks that had not
        have only this one, and one of the two is then complete.
        """
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
        return self.joined == facts or (
            f"step {facts['step']}: this rank's part is written; it counts once every stage's is, "
            "until then the newest checkpoint stands")

    def _commit(self, facts):
        with self.writer.rescuing(facts["step"]):
            for folder in (self.folder, self.own.staging):
                if not folder.is_dir():
                    os.mkdir(folder, 0o700)
            if not self._facts(self.folder, facts):
                self.own.commit(self.images, facts, -1)
            if all(found := [self._facts(folder, facts) for folder in self.parts]):
                record = max((part["record"] for part in found), key=lambda record: record.get("step", -1))
                name = folder_name(facts["step"])
                images = {part: Joined(self.whole[part], self.sources[part], facts["step"], file)
                          for part, file in TENSORS.items()}
                older = (step for step, _ in checkpoints(self.root) if step < facts["step"])
                self.committed = max(older, default=-1)
                self.writer.commit(images, facts | {"record": record}, self.committed)
                self.committed, self.joined = facts["step"], facts
                for folder in self.parts:
                    shutil.rmtree(folder / name, ignore_errors=True)

    def _facts(self, folder, facts):
        """The facts of the part in this folder, if it is of this state; else None. Records may differ."""
        try:
            found = glance(facts["step"], folder / folder_name(facts["step"]))
        except Damaged:
            return None
        return found if as_read(facts | {"record": found["record"]}) == found else None

    def _confirm(self, facts, before, began):
        if self.joined == facts:  # the rank that joined the parts reads the whole back
            super()._confirm(facts, before, began)


def _part(stage, replica):
    return f"part-s{stage}" + ("" if replica is None else f"r{replica}")
