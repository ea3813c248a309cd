"""Which tensors this rank holds, and how all ranks load the newest checkpoint of any node.

Each owner tells the names of its checkpoints. So all ranks have one table, and try it row by row, the newest
first: the rank that has it sends its manifest to all. Then each rank reads what it needs out of the folder it
sees, compares it with that manifest, and reads it straight into its tensors, all ranks side by side. A rank
that could not do so gets each tensor from one that could. If no rank has all bytes, all try the next row,
which overwrites the tensors. What cannot be read, though nothing shows that it is damaged, is not passed
over: the life ends, and the next one tries again.
"""

import contextlib
import json
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace

import torch

from common.checkpoint.disk import Damaged, patient, sha, to_json
from common.checkpoint.folder import TENSORS, checkpoints, folder_name, numbers_of, read_facts, read_manifest
from common.checkpoint.tensors import flat_bytes, kinds_of, read_file, size_of, threads
from common.errors import UserError
from common.world import send

FINE, LACKS, DAMAGED = range(3)  # how a rank fared with a checkpoint
MOST_SOURCES = 3  # ranks that are asked in turn for what others could not read


class Layout:
    """This rank's tensors and their places in a checkpoint; make it on every rank.

    In train_ddp.py and train_dp.py each rank holds the whole net, and one rank writes it. In train_mp.py a
    net is split into parts: a part for each stage, with --shard one for each stage and replica. Of a sharded
    tensor each part has some rows, the first part the first ones.
    """

    def __init__(self, state, world, shard):
        self.tensors = state.tensors()
        self.rows = state.rows()  # {name: (first row, rows of the whole)}
        self.parts = world.stages * (world.replicas if shard else 1)
        self.number = world.stage * world.replicas + world.replica if shard else world.stage
        self.writes = shard or world.replica == 0  # while all live; in a rescue any rank that holds the part
        self.alone = not (shard and world.replica)  # of a sharded net one replica writes what is not sharded
        self.kinds = {part: kinds_of(tensors) for part, tensors in self.tensors.items()}
        mine = {
            part: {name: self._whole(name, *kind) for name, kind in kinds.items()}
            for part, kinds in self.kinds.items()
        }
        stages = [mine]
        if world.stages > 1:  # the ranks of the first replica tell what they hold
            stages = [json.loads(send(world, to_json(mine), rank)) for rank in range(world.stages)]
        self.whole = {
            part: {name: kind for stage in stages for name, kind in stage[part].items()} for part in mine
        }
        self.mark = sha(to_json([self.whole, mine == stages[world.stage]]))  # equal on all ranks

    def _whole(self, name, dtype, shape):
        return [dtype, [self.rows[name][1], *shape[1:]] if name in self.rows else shape]

    def written(self, tensors):
        """Those of the state's tensors that this rank writes."""
        for part, own in tensors.items():
            kinds = kinds_of(own)
            if kinds != self.kinds[part]:
                name, _ = min(_items(kinds) ^ _items(self.kinds[part]))
                raise UserError(
                    f"{part}: {name} came, went or changed after the first step\n"
                    "no checkpoint would hold it: make it in the first step, as a tensor"
                )
        return {
            part: {name: tensor for name, tensor in own.items() if self.alone or name in self.rows}
            for part, own in tensors.items()
        }

    def check(self, files):
        """Damaged unless the files' rows follow each other and make up this run's tensors."""
        for part, file in TENSORS.items():
            ends = dict.fromkeys(self.whole[part], 0)
            for path in sorted(files):
                for name, (dtype, shape, first, _) in files[path].items() if path.endswith(file) else ():
                    ours, our_shape = self.whole[part].get(name, ("nothing", []))
                    if dtype != ours or shape[1:] != our_shape[1:] or len(shape) != len(our_shape):
                        raise Damaged(
                            f"{file}: {name[:80]} is {dtype}{shape}, this run has {ours}{our_shape}"
                        )
                    if first != ends[name]:
                        raise Damaged(f"{file}: {name} has no row {ends[name]}")
                    ends[name] += prod(shape[:1])
            for name, end in ends.items():
                rows = prod(self.whole[part][name][1][:1])
                if end != rows:
                    raise Damaged(f"{file}: {name} has {end:,} rows, this run has {rows:,}")

    def rooms(self, path, table):
        """{name: a context with the buffer of that tensor} of those in a file that this rank needs."""
        rooms = {}
        tensors = self.tensors["model" if path.endswith(TENSORS["model"]) else "optimizer"]
        for name in table.keys() & tensors.keys():
            dtype, shape, first, _ = table[name]
            tensor = tensors[name].detach()
            own_first = self.rows[name][0] if name in self.rows else 0
            at = (first - own_first) * size_of(dtype, shape[1:])
            size = size_of(dtype, shape)
            if at < tensor.numel() * tensor.itemsize and at + size > 0:
                rooms[name] = partial(_room, tensor, at, size)
        return rooms


def _items(kinds):
    return {(name, str(kind)) for name, kind in kinds.items()}


@contextlib.contextmanager
def _room(tensor, at, size):
    """A buffer for `size` bytes that begin at byte `at` of the tensor: its own memory, if they fill it.

    Of a tensor with holes, on a GPU, or of which only some rows are here, it is a copy of these rows.
    """
    flat = flat_bytes(tensor)  # of one with holes, a copy
    direct = tensor.is_contiguous() and not tensor.is_cuda and (at, size) == (0, len(flat))
    room = flat if direct else torch.empty(size, dtype=torch.uint8)
    yield memoryview(room.numpy())
    if not direct:
        low = max(at, 0)
        high = min(at + size, len(flat))
        flat[low:high].copy_(room[low - at : high - at])
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


# ---- the newest checkpoint of any node ------------------------------------------------------------------
@dataclass(frozen=True)
class Found:
    step: int  # the newest that verifies anywhere, or -1
    name: str  # checkpoints/step-N
    own: bool  # whether the disk that this rank sees has it
    facts: dict
    skipped: list  # the damaged ones of this rank
    offered: int  # how many names there were on all ranks


def load_newest(world, layout, root, own, report):
    """Reads the newest checkpoint into the tensors of every rank; call on every rank.

    `own` are (step, folder) that this rank offers. One that another rank offers may lie here too.
    """
    own = [numbers_of(folder.name) for _, folder in own]
    rows = _table(world, own)
    offered = len({row for row, _ in rows}) - 1
    skipped = []
    while True:
        (step, k), source = rows[0]
        if step < 0:
            return Found(-1, "", False, {}, skipped, offered)
        folder = root / folder_name(step, k)
        name = f"checkpoints/{folder.name}"
        with _trying(world, folder) as offering:
            if world.rank == source:
                offering.value = _offer(layout, step, folder)
        offer = json.loads(send(world, json.dumps(offering.value).encode(), source))
        with _trying(world, folder) as reading:
            if offer:
                reading.value = _read(layout, step, folder, offer["manifest"], world)
        reason = offering.reason or reading.reason
        outcome = DAMAGED if reason else FINE if reading.value else LACKS
        outcomes = _outcomes(world, outcome)
        loaded = bool(offer) and _share_out(world, layout, folder, offer["manifest"]["files"], outcomes)
        if reason and outcomes.index(DAMAGED) == world.rank:
            way = "received from another rank" if loaded else "trying the one before"
            report(f"{name}: {reason}; {way}")
        if (step, k) in own and outcome != LACKS and not (loaded and outcome == FINE):
            own.remove((step, k))
            skipped.append(folder)
        if loaded:
            return Found(step, name, outcome == FINE, offer["facts"], skipped, offered)
        # a rank that lacks it may have another checkpoint of that name
        rows = [row for row in rows[1:] if row[0] != (step, k) or outcomes[row[1]] == LACKS]


def _table(world, own):
    """[((step, k), a rank that has it)] of all ranks, newest first; its last step is -1."""
    most = max(int(count) for count in world.all_gather(torch.tensor([len(own)])))
    views = world.all_gather(torch.tensor(own + [(-1, 0)] * (most + 1 - len(own))))
    rows = {(tuple(row), rank) for rank, view in enumerate(views) for row in view.tolist()}
    return sorted(rows, key=lambda row: (row[0], -row[1]), reverse=True)


@contextlib.contextmanager
def _trying(world, folder):
    """Waits for all ranks, for longer than a collective would; `reason` tells what damage this one has met.

    An OSError of one rank ends this life on all.
    """
    trial = SimpleNamespace(value=None, reason="")
    with world.all_or_none():
        try:
            yield trial
        except Damaged as error:
            trial.reason = str(error)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be read: {error.strerror or error}; nothing shows that it is damaged, so "
                "it is not skipped\nstart again once it can be read, or move that folder away to resume from "
                "the one before",
                code=1,
            ) from error


def _offer(layout, step, folder):
    """All that a rank must know to read this checkpoint."""
    manifest, facts = read_facts(step, folder)
    layout.check(manifest["files"])
    return {"manifest": manifest, "facts": facts}


def _read(layout, step, folder, manifest, world):
    """Reads this very checkpoint; False if the folder that this rank sees does not have it."""
    if (step, folder) not in checkpoints(folder.parent) or patient(read_manifest)(step, folder) != manifest:
        return False
    for path, table in manifest["files"].items():
        rooms = layout.rooms(path, table)
        patient(read_file)(folder / path, table, rooms, threads(world.local_size))
    return True


def _outcomes(world, outcome):
    return [int(view) for view in world.all_gather(torch.tensor([outcome]))]


def _share_out(world, layout, folder, files, outcomes):
    """Whether all ranks have their tensors now, because those that read them have sent them to the others."""
    sources = [rank for rank, outcome in enumerate(outcomes) if outcome == FINE]
    for source in sources[:MOST_SOURCES]:
        if any(outcomes):
            outcomes = _outcomes(world, _relay(world, source, layout, folder, files))
    return not any(outcomes)


def _relay(world, source, layout, folder, files):
    """Sends each tensor from rank `source` to all; FINE if this rank has all of its bytes then."""
    outcome = FINE
    for path, table in files.items():
        rooms = layout.rooms(path, table)
        for name, (dtype, shape, _, stated) in table.items():
            piece = torch.zeros(size_of(dtype, shape) + 1, dtype=torch.uint8)
            data = memoryview(piece.numpy())[:-1]
            if world.rank == source:
                with contextlib.suppress(Damaged, OSError):
                    read_file(folder / path, table, {name: partial(contextlib.nullcontext, data)})
                    piece[-1] = 1
            world.broadcast(piece, source)
            if not piece[-1]:  # the source could not read it: all ranks see that
                return DAMAGED
            if sha(data) != stated:
                outcome = DAMAGED  # a rank that left here would let the others hang
            if name in rooms:
                with rooms[name]() as room:
                    room[:] = data
    return outcome
