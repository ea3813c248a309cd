"""Reads the files of one checkpoint straight into this rank's tensors, or gets them from another rank."""
import bisect
import queue
import threading
from functools import partial

import torch

import common.checkpoint.blocks as blocks
from common.checkpoint.blocks import HASHES, kind_of, read_file, spans
from common.checkpoint.files import Damaged, patient
from common.checkpoint.manifest import checkpoints, read_manifest

FINE, LACKS, UNREAD, DAMAGED = range(4)  # how a rank fared with a checkpoint


class Reading:
    """`told` is what the rank that offers the checkpoint says of it: files, and which tensor lies where."""

    def __init__(self, layout, folder, told):
        self.folder, self.files, self.staged, self.jobs = folder, told["files"], [], {}
        nothing = torch.empty(0, dtype=torch.uint8)
        places = {part: {name: self._place(layout, name, tensor) for name, tensor in tensors.items()}
                  for part, tensors in layout.tensors.items()}
        for file, segments in told["segments"].items():
            part = "model" if file.endswith("model.safetensors") else "optimizer"
            found = []
            for start, end, name, at in segments:
                flat, first = places[part].get(name, (nothing, 0))
                low, high = max(at, first), min(at + end - start, first + len(flat))
                if low < high:  # (from, to) of the file, and where in which tensor
                    found.append((start + low - at, start + high - at, flat, low - first))
            self.jobs[file] = sorted(found, key=lambda job: job[0])

    def _place(self, layout, name, tensor):
        """(its bytes, where they begin in the whole tensor); one with holes gets them at the end."""
        tensor = tensor.detach()
        if not tensor.is_contiguous():
            self.staged.append((tensor, torch.empty(tensor.shape, dtype=tensor.dtype)))
        flat = tensor if tensor.is_contiguous() else self.staged[-1][1]
        return flat.view(-1).view(torch.uint8), layout.first_byte(name, tensor)

    def finish(self):
        for tensor, flat in self.staged:
            tensor.copy_(flat)

    def read(self, step, moved, count):
        """(how it went, why) with the files of the folder that this rank sees."""
        try:
            there = (step, self.folder) in checkpoints(self.folder.parent)
            if not there or patient(read_manifest)(step, self.folder)["files"] != self.files:
                return LACKS, ""
            patient(self._read)(moved, count)
        except Damaged as reason:
            return DAMAGED, str(reason)
        except OSError as error:
            return UNREAD, error.strerror or str(error)
        return FINE, ""

    def _read(self, moved, count):
        for file, jobs in self.jobs.items():
            read_file(self.folder / file, self.files[file], partial(self._put, jobs),
                      partial(_overlap, jobs), False, moved, count)

    def _put(self, jobs, start, data):
        source, end = torch.frombuffer(data, dtype=torch.uint8) if len(data) else None, start + len(data)
        for low, high, flat, at in jobs[bisect.bisect_right(jobs, start, key=lambda job: job[1]):]:
            if low >= end:
                break
            first, last = max(low, start), min(high, end)
            flat[at + first - low:at + last - low].copy_(source[first - start:last - start])

    # ---- between ranks ----------------------------------------------------------------------------
    def relay(self, world, source):
        """Sends each block from rank `source` to all; whether this rank has all of its bytes then."""
        pieces = queue.Queue(2)
        if world.rank == source:  # reads a block while the one before is sent
            threading.Thread(target=self._feed, args=(pieces,), daemon=True).start()
        for file, jobs in self.jobs.items():
            for start, end, stated in spans(self.files[file]):
                digest = HASHES[kind_of(self.files[file])]()
                for at in range(start, end, blocks.BLOCK_BYTES):
                    piece = torch.zeros(min(blocks.BLOCK_BYTES, end - at) + 1, dtype=torch.uint8)
                    if world.rank == source and (data := pieces.get()) is not None:
                        piece[:-1].copy_(torch.frombuffer(data, dtype=torch.uint8))
                        piece[-1] = 1
                    world.broadcast(piece, source)
                    if not piece[-1]:
                        return False  # the source could not read it
                    data = memoryview(piece.numpy())[:-1]
                    digest.update(data)
                    self._put(jobs, at, data)
                if end > start and digest.hexdigest() != stated:
                    return False
        return True

    def _feed(self, pieces):
        def hand_on(start, data):
            pieces.put(bytearray(data))
        try:
            for file in self.jobs:
                read_file(self.folder / file, self.files[file], hand_on)
        except Exception:
            pieces.put(None)


def _overlap(jobs, start, end):
    """Whether the rank needs bytes of this block."""
    first = bisect.bisect_right(jobs, start, key=lambda job: job[1])
    return first < len(jobs) and jobs[first][0] < end
