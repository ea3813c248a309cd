"""Which tensors this rank holds, and how all ranks load the newest checkpoint of any node.

Each owner tells the names of its checkpoints, and all ranks try them together, the newest first. Each rank
reads what it needs out of the folder it sees, straight into its tensors, and compares it with the manifest.
Of the ranks that could read it, the first sends facts and tables to all. A rank that could not, or that has
other bytes under this name, gets each tensor from that one. If no rank has all bytes, all try the next name,
which overwrites the tensors. What cannot be read, though nothing shows that it is damaged, is not passed
over: the life ends, and the next one tries again.
"""

from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

import torch

from common.checkpoint.disk import Damaged, sha, to_json
from common.checkpoint.folder import TENSORS, checkpoints, folder_name, numbers_of, part_of, read_facts
from common.checkpoint.tensors import flat_bytes, kinds_of, read_file, size_of, threads
from common.errors import UserError, say
from common.world import gather


class Layout:
    """This rank's tensors and their places in a checkpoint; make it on every rank.

    In train_ddp.py and train_dp.py each rank holds the whole net, and one rank writes it. In train_mp.py a
    net is split into parts: a part for each stage, with --shard one for each stage and shard. Of a sharded
    tensor each part has some rows, the first part the first ones.
    """

    def __init__(self, state, world):
        self.tensors = state.tensors()
        self.rows = state.rows()  # {name: (first row, rows of the whole)}
        self.parts = world.parts
        self.number = world.part
        self.writes = world.copy == 0  # while all live; in a rescue any rank that holds the part
        self.writes_unsharded = world.shard == 0
        self.kinds = {part: self._kinds(tensors) for part, tensors in self.tensors.items()}
        # the ranks of the first replica tell what they hold
        stages = gather(world, None if world.replica else self.kinds)[: world.stages]
        self.whole = {
            part: {name: kind for stage in stages for name, kind in stage[part].items()} for part in TENSORS
        }
        self.fits = self.kinds == stages[world.stage]  # what the first replica holds of this stage

    def _kinds(self, tensors):
        """{name: [type, shape of the whole]}"""
        kinds = kinds_of(tensors)
        for name in kinds.keys() & self.rows.keys():
            _, shape = kinds[name]
            shape[0] = self.rows[name][1]
        return kinds

    def written(self, tensors):
        """Those of the state's tensors that this rank writes."""
        for part, own in tensors.items():
            kinds = self._kinds(own)
            for name in kinds | self.kinds[part]:
                if kinds.get(name) != self.kinds[part].get(name):
                    raise UserError(
                        f"{part}: {name} came, went or changed after the first step\n"
                        "no checkpoint would hold it: make it in the first step, as a tensor"
                    )
        return {
            part: {name: tensor for name, tensor in own.items() if self.writes_unsharded or name in self.rows}
            for part, own in tensors.items()
        }

    def check(self, files):
        """Damaged unless the files' rows follow each other and make up this run's tensors."""
        found = {part: {} for part in self.whole}  # each tensor's type, and its shape up to here
        for path in sorted(files):
            kinds = found[part_of(path)]
            for name, (dtype, shape, first, _) in files[path].items():
                before = kinds.get(name, [dtype, [0, *shape[1:]]])
                if before != [dtype, [first, *shape[1:]]]:
                    raise Damaged(f"{path}: {name[:80]} is {dtype}{shape} from row {first}, after {before}")
                kinds[name] = [dtype, [first + shape[0], *shape[1:]] if shape else []]
        for part, kinds in self.whole.items():
            for name in kinds | found[part]:
                is_there = found[part].get(name)
                if is_there != kinds.get(name):
                    raise Damaged(f"{part}: {name[:80]} is {is_there}, this run has {kinds.get(name)}")

    def rooms(self, path, table):
        """{name: a context with the buffer of that tensor} of those in a file that this rank needs."""
        rooms = {}
        tensors = self.tensors[part_of(path)]
        for name in table.keys() & tensors.keys():
            dtype, shape, first, _ = table[name]
            tensor = tensors[name].detach()
            own_first, _ = self.rows.get(name, (0, 0))
            at = (first - own_first) * size_of(dtype, shape[1:])
            size = size_of(dtype, shape)
            # The file's rows may begin above ours, at < 0; one of their bytes at least is ours.
            if at < tensor.numel() * tensor.itemsize and at + size > 0:
                rooms[name] = partial(_room, tensor, at, size)
        return rooms


@contextmanager
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
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


# ---- the newest checkpoint of any node ------------------------------------------------------------------
class Found(NamedTuple):
    facts: dict  # of the newest that verifies anywhere; empty if there is none
    name: str  # checkpoints/step-N
    own: bool  # whether the disk that this rank sees has it
    skipped: list  # the damaged ones of this rank
    names: set  # (step, k) of all ranks' checkpoints


def load_newest(world, layout, root, own):
    """Reads the newest checkpoint into the tensors of every rank; call on every rank.

    `own` are (step, folder) that this rank offers. One that another rank offers may lie here too.
    """
    offered = [numbers_of(folder.name) for _, folder in own]
    names = {tuple(row) for rows in gather(world, offered) for row in rows}
    skipped = []
    for step, k in sorted(names, reverse=True):
        folder = root / folder_name(step, k)
        checkpoint, damage = _read(world, layout, step, folder)
        mark = sha(to_json(checkpoint)) if checkpoint else ""
        marks, damages = zip(*gather(world, [mark, damage]), strict=True)
        source = _first(marks)
        loaded = False
        if source >= 0:
            files, facts = gather(world, checkpoint if world.rank == source else None)[source]
            loaded = len(set(marks)) == 1 or _relay(world, source, layout, folder, files)
        if damage and world.rank == _first(damages):
            way = "received from another rank" if loaded else "trying the one before"
            say(f"checkpoints/{folder.name}: {damage}; {way}")
        if (step, k) in offered and (damage or not loaded):
            skipped.append(folder)
        if loaded:
            return Found(facts, f"checkpoints/{folder.name}", mark == marks[source], skipped, names)
    return Found({}, "", False, skipped, names)


def _first(texts):
    """The first rank that has told something, or -1."""
    return next((rank for rank, text in enumerate(texts) if text), -1)


def _read(world, layout, step, folder):
    """((files, facts) of the checkpoint here, or None; the damage that this rank met); waits for all ranks.

    An OSError of one rank ends this life on all.
    """
    with world.all_or_none():
        try:
            if (step, folder) not in checkpoints(folder.parent):
                return None, ""
            manifest, facts = read_facts(step, folder)
            files = manifest["files"]
            layout.check(files)
            for path, table in files.items():
                rooms = layout.rooms(path, table)
                read_file(folder / path, table, rooms, threads(world.local_size))
            return (files, facts), ""
        except Damaged as error:
            return None, str(error)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be read: {error.strerror or error}; nothing shows that it is damaged, so "
                "it is not skipped\nstart again once it can be read, or move that folder away to resume from "
                "the one before",
                code=1,
            ) from error


def _relay(world, source, layout, folder, files):
    """Sends each tensor from rank `source` to all; whether all ranks have all of its bytes then."""
    right = True
    for path, table in files.items():
        rooms = layout.rooms(path, table)
        for name, (dtype, shape, _, stated) in table.items():
            piece = torch.zeros(size_of(dtype, shape), dtype=torch.uint8)
            data = memoryview(piece.numpy())
            if world.rank == source:
                with suppress(Damaged, OSError):  # then the bytes are wrong, and all ranks see that
                    read_file(folder / path, table, {name: partial(nullcontext, data)})
            world.all_sum(piece)  # zeros, but for those of `source`
            right = right and sha(data) == stated  # a rank that left here would let the others hang
            if name in rooms:
                with rooms[name]() as room:
                    room[:] = data
    return all(gather(world, right))
