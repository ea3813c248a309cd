"""Parts of one file of tensors: joined from those that ranks wrote, cut for what a rank owns; each byte is
hashed first.
"""
import contextlib
import hashlib
import os
import shutil

import torch

from common.checkpoint.files import CHUNK, Damaged, opened
from common.checkpoint.manifest import folder_name, read_manifest
from common.checkpoint.tensor_file import TensorFile

PIECE = 1 << 24  # bytes of a tensor that are hashed as one: a rank reads less than two too many
LONG = hashlib.sha256().digest_size


class Digests:
    """The SHA-256 of each piece of a whole file, of its header first; to be called with all that is read, in
    order.
    """

    def __init__(self, whole):
        self.first, self.ends = {}, [len(whole.header)]  # each tensor's first piece; where each piece ends
        for name, (at, size, _, _) in whole.places.items():
            self.first[name] = len(self.ends)
            self.ends += [len(whole.header) + at + min(start + PIECE, size) for start in range(0, size, PIECE)]
        self.header, self.found = hashlib.sha256(whole.header).digest(), b""

    def __call__(self, at, data):
        if at == 0:  # a file that is read once more begins anew
            self.found, self.digest = bytearray(), hashlib.sha256()
        while len(data) and len(self.found) < LONG * len(self.ends):  # a longer file is not that of this net
            n = min(len(data), self.ends[len(self.found) // LONG] - at)
            self.digest.update(data[:n])
            at, data = at + n, data[n:]
            if at == self.ends[len(self.found) // LONG]:
                self.found += self.digest.digest()
                self.digest = hashlib.sha256()

    def fits(self):
        """Whether what was read begins as a file of this net does, and is not shorter."""
        return len(self.found) == LONG * len(self.ends) and self.found.startswith(self.header)


class Slices:
    """What this rank owns of a whole file, {name: tensor}: read when asked for, and compared with the digests
    that the rank which has verified the file found.
    """

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
            expected = self.digests[LONG * (self.first[name] + k):][:LONG]
            if hashlib.sha256(piece).digest() != expected:
                raise Damaged(f"{self.file}: {name} is not what rank 0 has verified")
            self.moved()
        return torch.frombuffer(data, dtype=dtype, count=size // dtype.itemsize, offset=self.before[name] - low * PIECE).view(shape)


def _read(fd, place, at, wrong):
    while len(place):
        n = os.preadv(fd, [place], at)
        if n == 0:
            raise Damaged(wrong)
        place, at = place[n:], at + n


class Joined:
    """The bytes of a whole file, streamed from the parts; the last is not out before each part is what its
    manifest says.
    """

    def __init__(self, whole, sources, step, file):
        self.whole, self.sources, self.step, self.file = whole, sources, step, file

    @property
    def bytes(self):
        yield self.whole.header
        with contextlib.ExitStack() as stack:
            parts = {}
            for name in self.whole.places:
                for folder, names in self.sources[name]:
                    if folder not in parts:
                        place = folder / folder_name(self.step)
                        fd = stack.enter_context(opened(place / self.file))
                        parts[folder] = Part(fd, place, self.file, names, read_manifest(self.step, place)["files"][self.file])
                    yield from parts[folder].tensor(name)
            for part in parts.values():
                part.finish()


class Part:
    """One rank's file, read from its beginning to its end: its tensors lie in the order that the whole file
    has them in.
    """

    def __init__(self, fd, place, file, names, stated):
        self.fd, self.place, self.file, self.stated = fd, place, file, stated
        self.image = TensorFile({n: torch.empty((), dtype=getattr(torch, dtype)).expand(shape)
                            for n, (dtype, shape, _) in names.items()})
        self.digest, self.at = hashlib.sha256(), 0

    def tensor(self, name):
        at, size, _, _ = self.image.places[name]
        start = len(self.image.header) + at
        for _ in self._up_to(start):  # what the whole does not take is hashed as well
            pass
        assert self.at == start, f"{name} is out of order"
        yield from self._up_to(start + size)

    def finish(self):
        for _ in self._up_to(self.stated["bytes"]):
            pass
        if self.digest.hexdigest() != self.stated["sha256"]:
            self._wrong(f"has SHA-256 {self.digest.hexdigest()[:12]}..., its manifest says {self.stated['sha256'][:12]}...")

    def _wrong(self, what):
        """It goes, so that its rank can write this step anew."""
        shutil.rmtree(self.place, ignore_errors=True)
        raise Damaged(f"{self.place.parent.name}/{self.file} {what}")

    def _up_to(self, end):
        while self.at < end:
            piece = os.read(self.fd, min(CHUNK, end - self.at))
            if not piece:
                self._wrong(f"ends after {self.at:,} of {end:,} bytes")
            self.digest.update(piece)
            self.at += len(piece)
            yield piece
