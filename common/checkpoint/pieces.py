"""One file of tensors: joined from the parts that ranks wrote, or cut into what a rank owns, all hashed."""
import hashlib
import os
import shutil
from functools import partial

import torch

from common.checkpoint.blocks import put, read_file
from common.checkpoint.files import Damaged
from common.checkpoint.manifest import folder_name, read_manifest
from common.checkpoint.tensor_file import TensorFile

PIECE = 1 << 24  # bytes of a tensor hashed as one: a rank reads less than two pieces too many
DIGEST_BYTES = hashlib.sha256().digest_size


class Digests:
    """The SHA-256 of the header and each piece of a whole file; call it with all bytes, in order."""

    def __init__(self, whole):
        self.first, self.ends = {}, [len(whole.header)]  # each tensor's first piece; where each piece ends
        for name, (at, size, _, _) in whole.places.items():
            self.first[name] = len(self.ends)
            begin = len(whole.header) + at
            self.ends += [begin + min(start + PIECE, size) for start in range(0, size, PIECE)]
        self.header, self.found = hashlib.sha256(whole.header).digest(), b""

    def __call__(self, at, data):
        if at == 0:  # the file is read once more
            self.found, self.digest = bytearray(), hashlib.sha256()
        while len(data) and len(self.found) < DIGEST_BYTES * len(self.ends):  # else the file is too long
            n = min(len(data), self.ends[len(self.found) // DIGEST_BYTES] - at)
            self.digest.update(data[:n])
            at, data = at + n, data[n:]
            if at == self.ends[len(self.found) // DIGEST_BYTES]:
                self.found += self.digest.digest()
                self.digest = hashlib.sha256()

    def fits(self):
        """Whether the file has the header of this net, and is not shorter than its tensors."""
        return len(self.found) == DIGEST_BYTES * len(self.ends) and self.found.startswith(self.header)


class Slices:
    """{name: tensor} of what this rank owns of a file: read on demand, compared with rank 0's digests."""

    def __init__(self, fd, file, whole, own, before, digests, moved):
        self.fd, self.file, self.whole, self.own, self.before = fd, file, whole, own, before
        self.first, self.digests, self.moved = Digests(whole).first, digests, moved

    def __getitem__(self, name):
        at, length, _, _ = self.whole.places[name]
        _, size, dtype, shape = self.own.places[name]
        if not size:
            return torch.empty(shape, dtype=dtype)
        low, high = self.before[name] // PIECE, -(-(self.before[name] + size) // PIECE)
        data = bytearray(min(high * PIECE, length) - low * PIECE)
        for k in range(low, high):
            piece = memoryview(data)[(k - low) * PIECE:(k - low + 1) * PIECE]
            _read(self.fd, piece, len(self.whole.header) + at + k * PIECE, f"{self.file} ends within {name}")
            expected = self.digests[DIGEST_BYTES * (self.first[name] + k):][:DIGEST_BYTES]
            if hashlib.sha256(piece).digest() != expected:
                raise Damaged(f"{self.file}: {name} is not what rank 0 has verified")
            self.moved()
        count, offset = size // dtype.itemsize, self.before[name] - low * PIECE
        return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(shape)


def _read(fd, place, at, wrong):
    while len(place):
        n = os.preadv(fd, [place], at)
        if n == 0:
            raise Damaged(wrong)
        place, at = place[n:], at + n


class Joined:
    """The bytes of a whole file, out of the parts; Damaged if a part is not as its manifest says."""

    def __init__(self, whole, sources, step, file):
        self.whole, self.sources, self.step, self.file = whole, sources, step, file

    @property
    def bytes(self):
        whole = bytearray(self.whole.header).ljust(self.whole.size)
        parts, at = {}, {}
        for name, (start, *_) in self.whole.places.items():
            start += len(self.whole.header)
            for folder, names in self.sources[name]:
                if folder not in parts:
                    parts[folder] = self._part(folder / folder_name(self.step))
                    at[folder] = len(_image(names).header)
                size = _image(names).places[name][1]
                whole[start:start + size] = parts[folder][at[folder]:at[folder] + size]
                start, at[folder] = start + size, at[folder] + size
        return whole

    def _part(self, place):
        entry = read_manifest(self.step, place)["files"][self.file]
        found = bytearray(entry["bytes"])
        try:
            read_file(place / self.file, entry, partial(put, found))
        except Damaged:
            shutil.rmtree(place, ignore_errors=True)  # so that its rank can write this step again
            raise
        return found


def _image(names):
    return TensorFile({n: torch.empty((), dtype=getattr(torch, dtype)).expand(shape)
                       for n, (dtype, shape, _) in names.items()})
