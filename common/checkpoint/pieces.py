"""One file of tensors: joined from the parts that ranks wrote, or cut into what a rank owns, all hashed."""
import contextlib
import hashlib
import os
import shutil

import torch

from common.checkpoint.files import CHUNK, Damaged, opened
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
    """The bytes of a whole file, streamed from the parts; Damaged if a part is not as its manifest says."""

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
                        stated = read_manifest(self.step, place)["files"][self.file]
                        parts[folder] = Part(fd, place, self.file, names, stated)
                    yield from parts[folder].tensor(name)
            for part in parts.values():
                part.finish()


class Part:
    """One rank's file, read from beginning to end: its tensors have the order of the whole file."""

    def __init__(self, fd, place, file, names, stated):
        self.fd, self.place, self.file, self.stated = fd, place, file, stated
        self.image = TensorFile({n: torch.empty((), dtype=getattr(torch, dtype)).expand(shape)
                            for n, (dtype, shape, _) in names.items()})
        self.digest, self.at = hashlib.sha256(), 0

    def tensor(self, name):
        at, size, _, _ = self.image.places[name]
        start = len(self.image.header) + at
        for _ in self._up_to(start):  # bytes that the whole does not need are hashed too
            pass
        assert self.at == start, f"{name} is out of order"
        yield from self._up_to(start + size)

    def finish(self):
        for _ in self._up_to(self.stated["bytes"]):
            pass
        if self.digest.hexdigest() != self.stated["sha256"]:
            self._wrong(f"has SHA-256 {self.digest.hexdigest()[:12]}..., "
                        f"its manifest says {self.stated['sha256'][:12]}...")

    def _wrong(self, what):
        """Deletes the part, so that its rank can write this step again, and raises Damaged."""
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
