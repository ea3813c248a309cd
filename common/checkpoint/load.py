"""Loads the newest checkpoint of any node on every rank.

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

import torch

from common.checkpoint.disk import Damaged, patient
from common.checkpoint.folder import checkpoints, folder_name, numbers_of, read_facts, read_manifest
from common.checkpoint.tensors import flat_bytes, read_file, sha, spans, threads
from common.errors import UserError
from common.world import progress, send

FINE, LACKS, DAMAGED = range(3)  # how a rank fared with a checkpoint
MOST_SOURCES = 3  # ranks that are asked in turn for what others could not read


@dataclass(frozen=True)
class Found:
    step: int      # the newest that verifies anywhere, or -1
    name: str      # checkpoints/step-N
    own: bool      # whether the disk that this rank sees has it
    facts: dict
    skipped: list  # the damaged ones of this rank
    offered: int   # how many names there were on all ranks


def load_newest(world, layout, root, own, key, report):
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
        offer, outcome, reason = {}, LACKS, ""
        with _all_can_read(world, folder, f"offer {key} {rows[0]}"):
            if world.rank == source:
                try:
                    offer = _offer(layout, step, folder)
                except Damaged as error:
                    outcome, reason = DAMAGED, str(error)
        offer = json.loads(send(world, json.dumps(offer).encode(), source))
        loaded = False
        if offer:
            reading = Reading(layout, folder, offer)
            with _all_can_read(world, folder, f"read {key} {rows[0]}"):
                try:
                    outcome = reading.read(step, progress(world.store), threads(world.local_size))
                except Damaged as error:
                    outcome, reason = DAMAGED, str(error)
        outcomes = _outcomes(world, outcome)
        if offer:
            loaded = _share_out(world, reading, outcomes)
        if outcome == DAMAGED and outcomes.index(DAMAGED) == world.rank:
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
def _all_can_read(world, folder, name):
    """Waits for all ranks, for longer than a collective would; an OSError of one ends this life on all."""
    with world.all_or_none(name):
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be read: {error.strerror or error}; nothing shows that it is damaged, so "
                "it is not skipped\nstart again once it can be read, or move that folder away to resume from "
                "the one before", code=1) from error


def _offer(layout, step, folder):
    """All that a rank must know to read this checkpoint."""
    manifest, facts = read_facts(step, folder)
    firsts = patient(layout.firsts)(folder, manifest["files"])
    return {"files": manifest["files"], "facts": facts, "firsts": firsts}


def _outcomes(world, outcome):
    return [int(view) for view in world.all_gather(torch.tensor([outcome]))]


def _share_out(world, reading, outcomes):
    """Whether all ranks have their tensors now, because those that read them have sent them to the others."""
    sources = [rank for rank, outcome in enumerate(outcomes) if outcome == FINE]
    for source in sources[:MOST_SOURCES]:
        if any(outcomes):
            received = reading.relay(world, source)
            outcomes = _outcomes(world, FINE if received else DAMAGED)
    return not any(outcomes)


class Reading:
    """Reads the files of one checkpoint straight into this rank's tensors, or gets them from another rank.

    `offer` is what its owner says of it: its files, and which rows of a tensor each has.
    """

    def __init__(self, layout, folder, offer):
        self.folder, self.files, self.layout = folder, offer["files"], layout
        self.rooms = {file: self._rooms(file, firsts) for file, firsts in offer["firsts"].items()}

    def _rooms(self, file, firsts):
        """{name: a context with the buffer of that piece} of all pieces of a file that this rank needs."""
        rooms = {}
        tensors = self.layout.tensors["model" if file.endswith("model.safetensors") else "optimizer"]
        for name, start, end, _ in spans(self.files[file]):
            if name in firsts and name in tensors and end > start:
                tensor = tensors[name].detach()
                at = firsts[name] - self.layout.first_byte(name, tensor)
                if at < tensor.numel() * tensor.itemsize and at + end - start > 0:
                    rooms[name] = partial(_room, tensor, at, end - start)
        return rooms

    def read(self, step, moved, count):
        """FINE, or LACKS if the folder that this rank sees does not have this very checkpoint."""
        if (step, self.folder) not in checkpoints(self.folder.parent):
            return LACKS
        if patient(read_manifest)(step, self.folder)["files"] != self.files:
            return LACKS
        for file, rooms in self.rooms.items():
            patient(read_file)(self.folder / file, self.files[file], rooms, moved, count)
        return FINE

    def relay(self, world, source):
        """Sends each piece from rank `source` to all; whether this rank has all of its bytes then."""
        whole = True
        for file, rooms in self.rooms.items():
            for name, start, end, stated in spans(self.files[file]):
                piece = torch.zeros(end - start + 1, dtype=torch.uint8)
                data = memoryview(piece.numpy())[:-1]
                if world.rank == source:
                    with contextlib.suppress(Damaged, OSError):
                        here = partial(contextlib.nullcontext, data)
                        read_file(self.folder / file, self.files[file], {name: here})
                        piece[-1] = 1
                world.broadcast(piece, source)
                if not piece[-1]:  # the source could not read it: all ranks see that
                    return False
                whole = whole and sha(data) == stated  # a rank that left here would let the others hang
                if name in rooms:
                    with rooms[name]() as room:
                        room[:] = data
        return whole


@contextlib.contextmanager
def _room(tensor, at, size):
    """A buffer for `size` bytes that begin at byte `at` of the tensor: its own memory, if they fill it.

    Of a tensor with holes, on a GPU, or of which only some rows are here, it is a copy of this one piece.
    """
    flat = flat_bytes(tensor)  # of one with holes, a copy
    direct = tensor.is_contiguous() and not tensor.is_cuda and (at, size) == (0, len(flat))
    room = flat if direct else torch.empty(size, dtype=torch.uint8)
    yield memoryview(room.numpy())
    if not direct:
        low, high = max(at, 0), min(at + size, len(flat))
        flat[low:high].copy_(room[low - at:high - at])
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
