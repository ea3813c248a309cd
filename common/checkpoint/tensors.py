"""A safetensors file as its header and its tensors, one after the other, each with a hash of its own.

What a file holds is one table, {name: [type, shape, SHA-256]}: the manifest has it, and the header
follows from it. A file with another header is refused, so no header is ever parsed.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from common.checkpoint.disk import Damaged, compare_hash, new_file, opened, patient, write_at
from common.device import is_gpu, mark, wait_by_polling
from common.errors import UserError
from common.options import extra

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
NO_NAME = "__metadata__"  # of a tensor, in this format
CHUNK_BYTES = 1 << 22  # read or written at once
SYNC_BYTES = 1 << 26  # between two syncs of a long file: no stall of minutes at its end
MOST_THREADS = 8
WIPE_ON_FORK = 18  # madvise: pages shared with a forked process are copied one by one in a save


# ---- the format ---------------------------------------------------------------------------------------
def specs_of(tensors: dict[str, Tensor]) -> dict[str, list]:
    """Return {name: [type, shape]} of tensors; UserError for one that cannot be saved."""
    specs = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or tensor.layout != torch.strided or name == NO_NAME:
            raise UserError(
                f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}: cannot be saved\n"
                "keep such tensors out of the net's parameters and buffers (persistent=False)"
            )
        specs[name] = [NAMES[tensor.dtype], list(tensor.shape)]
    return specs


def size_of(dtype, shape):
    return prod(shape) * DTYPES[dtype].itemsize


def lay_out(specs):
    """Return (header, {name: (first byte, end)}, bytes) of the file that holds {name: [type, shape, ...]}.

    Wide types come first, then it goes by name: each tensor is aligned, and equal states are equal bytes.
    """
    entries = {}
    end = 0
    for name in sorted(specs, key=lambda name: (-DTYPES[specs[name][0]].itemsize, name)):
        dtype, shape, *_ = specs[name]
        start = end
        end += size_of(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the format pads with spaces; data starts on a cache line
    header = len(text).to_bytes(8, "little") + text
    places = {name: [len(header) + at for at in entry["data_offsets"]] for name, entry in entries.items()}
    return header, places, len(header) + end


# ---- writing and reading --------------------------------------------------------------------------------
def threads(processes: int = 1) -> int:
    """Return how many threads of this process may hash, if so many processes of this machine hash at once."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // processes))


def spread(act, count, items):
    """Return [act(item) ...], on `count` threads; on the caller's if that is enough or none starts."""
    if min(count, len(items)) > 1:
        with suppress(RuntimeError), ThreadPoolExecutor(count) as pool:
            return list(pool.map(act, items))
    return list(map(act, items))


def write_file(path, tensors, moved):
    """Write and sync a new file, out of the tensors' own memory; return its table."""
    specs = specs_of(tensors)
    header, places, _ = lay_out(specs)

    def write(name):
        start, end = places[name]
        data = memoryview(flat_bytes(tensors[name]).cpu().numpy())
        digest = hashlib.sha256()
        for at in range(start, end, CHUNK_BYTES):
            chunk = data[at - start : at - start + CHUNK_BYTES]
            digest.update(chunk)
            write_at(fd, chunk, at)
            if at // SYNC_BYTES != (at + CHUNK_BYTES) // SYNC_BYTES:  # a slow disk's cache would fill memory
                os.fdatasync(fd)
            moved()
        return [*specs[name], digest.hexdigest()]

    with new_file(path) as fd:
        write_at(fd, header, 0)
        return dict(zip(places, spread(write, threads() + 1, list(places)), strict=True))


@patient
def read_file(
    path: Path,
    table: dict,
    targets: dict[str, Tensor] | None = None,
    count: int = 1,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Compare a file with its table, on `count` threads; Damaged if one byte differs.

    Each tensor is read into that of its name among the `targets`; without them all are read, and dropped.
    """
    header, places, size = lay_out(table)
    with opened(path) as fd:
        found = os.fstat(fd).st_size
        if found != size:
            raise Damaged(f"{path.name} is {found:,} bytes, manifest says {size:,}")
        start = bytearray(len(header))
        _fill(fd, memoryview(start), 0, path.name)
        if start != header:
            raise Damaged(f"{path.name}: its header is not the one that its manifest needs")

        def read(name):
            start, end = places[name]
            digest = hashlib.sha256()
            with buffer_of(targets[name]) if targets else nullcontext() as buffer:
                for at in range(start, end, CHUNK_BYTES):
                    stop = min(at + CHUNK_BYTES, end)
                    chunk = buffer[at - start : stop - start] if buffer else memoryview(bytearray(stop - at))
                    _fill(fd, chunk, at, path.name)
                    moved()
                    digest.update(chunk)
                compare_hash(path.name, digest.hexdigest(), table[name][2], f" in {name}")

        spread(read, count, list(targets or places))  # raises what a thread has raised


def _fill(fd, chunk, at, name):
    while len(chunk):
        count = os.preadv(fd, [chunk], at)
        if not count:
            raise Damaged(f"{name} ends after {at:,} bytes")
        chunk = chunk[count:]
        at += count


@contextmanager
def buffer_of(tensor):
    """Yield a buffer for a tensor's bytes: its own memory, or a copy, if it has holes or is on a GPU."""
    flat = flat_bytes(tensor)  # of one with holes, a copy
    direct = tensor.is_contiguous() and not is_gpu(tensor.device)
    buffer = flat if direct else torch.empty(len(flat), dtype=torch.uint8)
    yield memoryview(buffer.numpy())
    if not direct:
        tensor.copy_(buffer.view(tensor.dtype).view(tensor.shape))


def flat_bytes(tensor):
    """Return a tensor's bytes as a flat tensor; if it has holes, those of a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


# ---- the copy of the state that a save writes -----------------------------------------------------------
class Image:
    """A copy of tensors in one host buffer, which serves every save: `views` by their names.

    Every page of the buffer is written at once, so that no save waits for the kernel.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        self.specs = specs_of(tensors)
        self.devices = {tensor.device for tensor in tensors.values()}
        _, places, size = lay_out(self.specs)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # unknown to this kernel: then the save after a fork is slower
            memory.madvise(WIPE_ON_FORK)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).zero_()
        on_one_gpu = [device.type for device in self.devices] == ["cuda"]
        self.is_pinned = on_one_gpu and extra("pinned")(buffer, *self.devices)  # it copies by itself
        self.views = {}
        for name, (start, end) in places.items():
            dtype, shape = self.specs[name]
            self.views[name] = buffer[start:end].view(DTYPES[dtype]).view(shape)

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor]) -> None:
        """Make the one copy that training waits for; nothing that may hang is left on the GPU then."""
        sources = [tensors[name].detach() for name in self.views]
        if sources:
            torch._foreach_copy_(list(self.views.values()), sources, non_blocking=self.is_pinned)
            for device in self.devices:
                wait_by_polling(mark(device))
