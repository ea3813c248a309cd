"""Which tensors this rank holds, and which bytes of a checkpoint's files they are.

In train_ddp.py and train_dp.py each rank holds the whole net, and one rank writes it. In train_mp.py a net
is split into parts: a part for each stage, with --shard one for each stage and replica. Each part is written
by a rank that holds it. A sharded tensor lies in several parts, its first rows in the first of them.

The digest is over the whole files that one rank would write. So no block of a part crosses the end of a block
of the whole: the hashes of the parts' blocks are those of the whole, wherever a block lies in one part.
"""
import hashlib
import json
from collections import deque
from math import prod

import torch

import common.checkpoint.blocks as blocks
from common.checkpoint.blocks import read_range, root, sha, spans
from common.checkpoint.files import Damaged
from common.checkpoint.manifest import TENSORS, parts_of
from common.checkpoint.tensor_file import DTYPES, lay_out, read_header
from common.world import send


class Layout:
    """This rank's tensors and their places; make it on every rank: stages tell each other what they hold."""

    def __init__(self, state, world, shard):
        self.tensors, self.rows = state.tensors(), state.rows()
        self.parts = world.stages * (world.replicas if shard else 1)
        self.number = world.stage * world.replicas + world.replica if shard else world.stage
        self.writes = shard or world.replica == 0  # while all live; in a rescue any rank that holds the part
        mine = {part: {name: (tensor.dtype, self._shape(name, tensor)) for name, tensor in tensors.items()}
                for part, tensors in self.tensors.items()}
        whole = {part: {} for part in mine}
        told = list(_tell(world, mine)) if world.stages > 1 else [mine]
        for tensors_of in told:
            for part, found in tensors_of.items():
                whole[part] |= found
        self.header, self.whole = {}, {}
        for part, found in whole.items():
            self.header[part], self.whole[part] = lay_out(found)
        # equal on all ranks, if those of each stage hold the same
        self.mark = sha(b"".join(self.header.values()) + bytes([mine == told[world.stage]]))
        # of a sharded net the first replica alone writes what is not sharded
        own = self.rows if shard and world.replica else None
        self.written = {part: {n: t for n, t in tensors.items() if own is None or n in own}
                        for part, tensors in self.tensors.items()}

    def _shape(self, name, tensor):
        return (self.rows[name][1], *tensor.shape[1:]) if name in self.rows else tuple(tensor.shape)

    def first_byte(self, name, tensor):
        """Where this rank's rows begin in the whole tensor."""
        return self.rows[name][0] * prod(tensor.shape[1:]) * tensor.itemsize if name in self.rows else 0

    # ---- reading ----------------------------------------------------------------------------------
    def segments(self, folder, manifest):
        """{file: [(start, end, name, byte of the whole tensor)]}; Damaged unless they make up the whole."""
        found, filled = {}, {part: dict.fromkeys(whole, 0) for part, whole in self.whole.items()}
        for prefix in parts_of(manifest["files"]):
            for part, file in TENSORS.items():
                name = prefix + file
                places = self._places(folder / name, manifest["files"][name], part)
                found[name] = [(start, start + size, tensor, filled[part][tensor])
                               for tensor, (start, size, *_) in places.items()]
                for tensor, (_, size, *_) in places.items():
                    filled[part][tensor] += size
        for part, sizes in filled.items():
            for tensor, size in sizes.items():
                if size != self.whole[part][tensor][1]:
                    raise Damaged(f"{TENSORS[part]}: {tensor} is {size:,} bytes, "
                                  f"this run has {self.whole[part][tensor][1]:,}")
        return found

    def _places(self, path, entry, part):
        header, whole = self.header[part], self.whole[part]
        length = 8 + int.from_bytes(read_range(path, entry, 0, min(8, entry["bytes"])), "little")
        if length > min(len(header), entry["bytes"]):  # this bounds how much memory is allocated
            raise Damaged(f"{path.name}: its header is not the one this model and optimizer need "
                          f"({length:,} bytes)")
        places = read_header(read_range(path, entry, 0, length), path.name)
        for name, (_, _, dtype, shape) in places.items():
            if name not in whole:
                raise Damaged(f"{path.name}: {name[:80]} is no tensor of this run")
            ours = whole[name]
            if dtype != ours[2] or shape[1:] != ours[3][1:] or len(shape) != len(ours[3]):
                raise Damaged(f"{path.name}: {name} is {DTYPES[dtype]}{list(shape)}, "
                              f"this run has {DTYPES[ours[2]]}{list(ours[3])}")
        return places

    # ---- writing ----------------------------------------------------------------------------------
    def cut(self, part, image):
        """Where the blocks of this rank's file end, and where they start in the whole (the header's: -1)."""
        ends, starts, after = [len(image.header)], [-1], -1
        for name, (_, size, *_) in image.places.items():
            at = self.whole[part][name][0] + self.first_byte(name, self.written[part][name])
            while size:
                n = min(size, blocks.BLOCK_BYTES - at % blocks.BLOCK_BYTES)
                if at == after and at % blocks.BLOCK_BYTES:
                    ends[-1] += n
                else:
                    starts.append(at)
                    ends.append(ends[-1] + n)
                at, size = at + n, size - n
                after = at
        return ends, starts

    def root_of(self, part, files):
        """The one hash of the whole file; `files` are (path, entry, starts) of all parts."""
        pieces = [(start, end - begin, path, entry, begin, found) for path, entry, starts in files
                  for start, (begin, end, found) in zip(starts, spans(entry), strict=True) if start >= 0]
        pieces, hashes, at = deque(sorted(pieces, key=lambda piece: piece[0])), [], 0
        ends = [start + size for start, size, *_ in self.whole[part].values()]
        for end in blocks.cut(max(ends, default=len(self.header[part]))):
            data, inside = self.header[part][at:end], []
            while pieces and pieces[0][0] < end:
                inside.append(pieces.popleft())
            if sum(piece[1] for piece in inside) + len(data) != end - at:
                raise Damaged(f"{TENSORS[part]}: the parts do not make up bytes {at:,} to {end:,}")
            digest = hashlib.sha256(data)
            for _, length, path, entry, begin, _ in inside if data or len(inside) > 1 else ():
                digest.update(read_range(path, entry, begin, begin + length))
            hashes.append(inside[0][-1] if len(inside) == 1 and not data else digest.hexdigest())
            at = end
        return root(hashes)


def _tell(world, mine):
    """What the ranks of the first replica hold, stage after stage."""
    text = json.dumps({part: {name: [str(dtype).removeprefix("torch."), shape] for name, (dtype, shape) in
                              tensors.items()} for part, tensors in mine.items()}).encode()
    for rank in range(world.stages):
        told = json.loads(send(world, text, rank))
        yield {part: {name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in tensors.items()}
               for part, tensors in told.items()}
