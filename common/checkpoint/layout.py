"""Which tensors this rank holds, and which bytes of a checkpoint's files they are.

In train_ddp.py and train_dp.py each rank holds the whole net, and one rank writes it. In train_mp.py a net
is split into parts: a part for each stage, with --shard one for each stage and replica. Each part is written
by a rank that holds it. A sharded tensor lies in several parts, its first rows in the first of them.
"""
import json
from math import prod

import torch

from common.checkpoint.disk import Damaged
from common.checkpoint.folder import TENSORS, parts_of
from common.checkpoint.tensors import DTYPES, lay_out, read_header, read_header_piece, sha, spans
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
        stages = _tell(world, mine) if world.stages > 1 else [mine]
        self.header, self.whole = {}, {}
        for part in mine:
            tensors = {name: kind for stage in stages for name, kind in stage[part].items()}
            self.header[part], self.whole[part] = lay_out(tensors)
        # equal on all ranks, if those of each stage hold the same
        self.mark = sha(b"".join(self.header.values()) + bytes([mine == stages[world.stage]]))
        # of a sharded net the first replica alone writes what is not sharded
        alone = not (shard and world.replica)
        self.written = {part: {name: tensor for name, tensor in tensors.items() if alone or name in self.rows}
                        for part, tensors in self.tensors.items()}

    def _shape(self, name, tensor):
        return (self.rows[name][1], *tensor.shape[1:]) if name in self.rows else tuple(tensor.shape)

    def first_byte(self, name, tensor):
        """Where this rank's rows begin in the whole tensor."""
        return self.rows[name][0] * prod(tensor.shape[1:]) * tensor.itemsize if name in self.rows else 0

    def firsts(self, folder, files):
        """{file: {name: its first byte in the whole tensor}}; Damaged unless they make up the whole."""
        firsts, filled = {}, {part: dict.fromkeys(whole, 0) for part, whole in self.whole.items()}
        for prefix in parts_of(files):
            for part, name in TENSORS.items():
                file = prefix + name
                places = self._places(folder / file, files[file], part)
                firsts[file] = {tensor: filled[part][tensor] for tensor in places}
                for tensor, (_, size, *_) in places.items():
                    filled[part][tensor] += size
        for part, sizes in filled.items():
            for tensor, size in sizes.items():
                if size != self.whole[part][tensor][1]:
                    raise Damaged(f"{TENSORS[part]}: {tensor} is {size:,} bytes, "
                                  f"this run has {self.whole[part][tensor][1]:,}")
        return firsts

    def _places(self, path, entry, part):
        _, header_bytes = entry["sha256"][0][:2]
        if header_bytes > len(self.header[part]):  # this bounds how much memory is allocated
            raise Damaged(f"{path.name}: its header is not the one this model and optimizer need "
                          f"({header_bytes:,} bytes)")
        places = read_header(read_header_piece(path, entry), path.name)
        stated = [(name, start, end) for name, start, end, _ in spans(entry)[1:]]
        if stated != [(name, start, start + size) for name, (start, size, *_) in places.items()]:
            raise Damaged(f"{path.name}: the manifest tells of other pieces than its header")
        for name, (_, _, dtype, shape) in places.items():
            if name not in self.whole[part]:
                raise Damaged(f"{path.name}: {name[:80]} is no tensor of this run")
            _, _, our_dtype, our_shape = self.whole[part][name]
            if dtype != our_dtype or shape[1:] != our_shape[1:] or len(shape) != len(our_shape):
                raise Damaged(f"{path.name}: {name} is {DTYPES[dtype]}{list(shape)}, "
                              f"this run has {DTYPES[our_dtype]}{list(our_shape)}")
        return places


def _tell(world, mine):
    """What the ranks of the first replica hold, stage after stage."""
    text = json.dumps({part: {name: [str(dtype).removeprefix("torch."), shape] for name, (dtype, shape) in
                              tensors.items()} for part, tensors in mine.items()}).encode()
    stages = [json.loads(send(world, text, rank)) for rank in range(world.stages)]
    return [{part: {name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in tensors.items()}
             for part, tensors in stage.items()} for stage in stages]
