"""A safetensors file as its header and its tensors, one after the other, each with a hash of its own.

So threads hash, write and read side by side, and the hashes of a net's tensors are the same however many
files they lie in. The manifest's entry of a file is {"bytes": its size, "sha256": [[name, end, hash], ...]}:
its pieces. The piece "" is the header, or all of any other file. Names, shapes and types come from the live
net: a file whose header is not the one that we would write is refused.
"""
import bisect
import contextlib
import hashlib
import json
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from common.checkpoint.disk import Damaged, opened, parse_json
from common.errors import UserError

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
          torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
          torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
CHUNK_BYTES = 1 << 22        # read or written at once
SYNC_BYTES = 1 << 26         # between two syncs of a long file: no stall of minutes at its end
MOST_THREADS = 8
CHECKED_ELEMENTS = 1 << 22   # elements checked at once: bounds the memory of the check
# madvise: a forked process gets zeros; pages shared with it would be copied one by one in the next save
WIPE_ON_FORK = 18


# ---- the format ---------------------------------------------------------------------------------------
def lay_out(tensors):
    """(header, {name: (start, bytes, type, shape)}) of the file that holds {name: (type, shape)}.

    Wide types come first, then it goes by name: each tensor is aligned, and equal states are equal bytes.
    """
    entries, places, at = {}, {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        size = prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        places[name] = (at, size, dtype, tuple(shape))
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the format pads with spaces; data starts on a cache line
    header = len(text).to_bytes(8, "little") + text
    return header, {name: (len(header) + place[0], *place[1:]) for name, place in places.items()}


def read_header(data, file_name):
    """What `lay_out` returned when it made this header; Damaged if it makes another one."""
    known = {name: dtype for dtype, name in DTYPES.items()}
    tensors = {}
    for name, entry in parse_json(data[8:], f"{file_name}: its header").items():
        try:
            tensors[name] = known[entry["dtype"]], tuple(entry["shape"])
            whole = all(type(count) is int and 0 <= count < 2**62 for count in entry["shape"])
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise Damaged(f"{file_name}: {name[:80]} is {str(entry)[:100]}")
    header, places = lay_out(tensors)
    if header != data:
        raise Damaged(f"{file_name}: its header is written differently")
    return places


# ---- writing and reading in pieces ----------------------------------------------------------------------
def threads(processes=1):
    """How many threads of this process may hash, if so many processes of this machine hash at once."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // processes))


def sha(data):
    return hashlib.sha256(data).hexdigest()


def spans(entry):
    """(name, start, end, hash) of each piece."""
    ends = [0, *(end for _, end, _ in entry["sha256"])]
    return [(name, start, end, stated)
            for (name, end, stated), start in zip(entry["sha256"], ends, strict=False)]


def spread(act, count, items):
    """[act(item) of all items], on `count` threads; on the caller's if one is enough or none can start."""
    if min(count, len(items)) > 1:
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(count) as pool:
            return list(pool.map(act, items))
    return list(map(act, items))


def write_file(path, data, pieces=None, moved=lambda: None):
    """Writes and syncs a new file; returns its entry. `data` has a length; `data[start:end]` is a buffer.

    `pieces` are (name, start, end), without a gap. O_EXCL and O_NOFOLLOW: it never writes into an old file or
    a planted link. After a failed fsync the kernel counts the file's pages as clean: the caller must drop it.
    """
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(piece):
        name, start, end = piece
        digest = hashlib.sha256()
        for begin in range(start, end, CHUNK_BYTES):
            chunk = memoryview(data[begin:min(begin + CHUNK_BYTES, end)])
            digest.update(chunk)  # of what goes to the disk
            at = begin
            while len(chunk):
                count = os.pwrite(fd, chunk, at)
                chunk = chunk[count:]
                at += count
            if begin // SYNC_BYTES != at // SYNC_BYTES:  # or a slow disk's cache would fill the memory
                os.fdatasync(fd)
            moved()
        return [name, end, digest.hexdigest()]

    try:
        hashes = spread(write, threads() + 1, pieces or [("", 0, len(data))])
        os.fsync(fd)
    finally:
        os.close(fd)
    return {"bytes": len(data), "sha256": hashes}


def read_file(path, entry, rooms=None, moved=lambda: None, count=1):
    """Reads a file's pieces and compares them, on `count` threads.

    `rooms` are {name: a function that returns a context, which yields the buffer for that piece}; without
    them all are read, and dropped. Refuses a file of another size.
    """
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size != entry["bytes"]:
            raise Damaged(f"{path.name} is {size:,} bytes, manifest says {entry['bytes']:,}")

        def read(span):
            name, start, end, stated = span
            digest = hashlib.sha256()
            with rooms[name]() if rooms else contextlib.nullcontext() as room:
                for at in range(start, end, CHUNK_BYTES):
                    low, high = at - start, min(at + CHUNK_BYTES, end) - start
                    chunk = room[low:high] if rooms else memoryview(bytearray(high - low))
                    _fill(fd, chunk, at, path.name)
                    digest.update(chunk)
                    moved()
                if digest.hexdigest() != stated:
                    raise Damaged(f"{path.name} has sha256 {digest.hexdigest()[:12]}... in "
                                  f"{name or 'its header'}, manifest says {stated[:12]}...")

        # raises what a thread has raised
        spread(read, count, [span for span in spans(entry) if rooms is None or span[0] in rooms])


def read_header_piece(path, entry):
    """The bytes of a file's first piece, after they were compared."""
    data = bytearray(entry["sha256"][0][1])
    read_file(path, entry, {"": lambda: contextlib.nullcontext(memoryview(data))})
    return bytes(data)


def _fill(fd, chunk, at, name):
    while len(chunk):
        count = os.preadv(fd, [chunk], at)
        if not count:
            raise Damaged(f"{name} ends after {at:,} bytes")
        chunk = chunk[count:]
        at += count


# ---- the two sources of a file's bytes ------------------------------------------------------------------
class Image:
    """A copy of the tensors in one host buffer, which serves every save; `wait` before you read it."""

    def __init__(self, tensors):
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
                raise UserError(
                    f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}: it cannot be saved\n"
                    "keep such tensors out of the net's parameters and buffers (persistent=False)")
        self.header, self.places = lay_out({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
        self.size = max((start + size for start, size, *_ in self.places.values()), default=len(self.header))
        self.pieces = [("", 0, len(self.header)),
                       *((name, at, at + size) for name, (at, size, *_) in self.places.items())]
        self.gpus = {t.device for t in tensors.values() if t.is_cuda}
        self.guard = threading.Lock()
        self.buffer = self.bytes = self.stream = self.copied = None
        self.views = {}

    def open(self):
        """Allocates the buffer, once; every page of it is written, so that no save waits for the kernel."""
        with self.guard:
            if self.buffer is None:
                self.buffer = self._allocate()
                self.views = {name: self.buffer[at:at + size].view(dtype).view(shape)
                              for name, (at, size, dtype, shape) in self.places.items()}
                self.bytes = memoryview(self.buffer.numpy())
                self.bytes[:len(self.header)] = self.header
        return self

    def _allocate(self):
        if len(self.gpus) == 1:
            with contextlib.suppress(RuntimeError):  # the driver may refuse to lock so much memory
                return self._pinned(*self.gpus)
        memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # unknown to this kernel: then the save after a fork is slower
            memory.madvise(WIPE_ON_FORK)
        return torch.frombuffer(memory, dtype=torch.uint8).zero_()

    def _pinned(self, gpu):
        buffer = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(gpu)
        self.copied = torch.cuda.Event()
        return buffer

    @torch.no_grad()
    def copy(self, tensors):
        """The one copy that training waits for. Of a GPU's tensors it is only begun: `wait` before you read.

        An update waits for it, and it waits for nothing: the weights are whole (training/updates.py).
        """
        self.open()
        for name, (_, _, dtype, shape) in self.places.items():
            if tensors[name].dtype != dtype or tensors[name].shape != shape:
                now = f"{tensors[name].dtype} {tuple(tensors[name].shape)}"
                raise RuntimeError(f"{name} was {dtype} {tuple(shape)}, now {now}")
        sources = [tensors[name].detach() for name in self.views]
        if not sources:
            return
        if self.stream is None:
            torch._foreach_copy_(list(self.views.values()), sources)
            return
        with torch.cuda.stream(self.stream):
            torch._foreach_copy_(list(self.views.values()), sources, non_blocking=True)
            for source in sources:
                if source.is_cuda:
                    source.record_stream(self.stream)
            self.copied.record()

    def wait(self):
        """Waits until the copy is complete."""
        if self.copied is not None:
            self.copied.synchronize()


class Live:
    """The same file out of the tensors themselves: a rescue needs no second copy of the state."""

    def __init__(self, image, tensors):
        self.header, self.pieces, self.size, self.views = image.header, image.pieces, image.size, tensors
        self.names = list(image.places)
        self.starts = [at for at, *_ in image.places.values()]
        self.bytes = self

    def __len__(self):
        return self.size

    def __getitem__(self, span):
        """Without a copy where the bytes lie in one tensor of this machine's memory."""
        head = bytearray(self.header[span])
        buffers = [torch.frombuffer(head, dtype=torch.uint8)] if head else []
        for i in range(max(0, bisect.bisect_right(self.starts, span.start) - 1), len(self.names)):
            if self.starts[i] >= span.stop:
                break
            low, high = max(0, span.start - self.starts[i]), span.stop - self.starts[i]
            buffers.append(flat_bytes(self.views[self.names[i]])[low:high].cpu())
        return memoryview((buffers[0] if len(buffers) == 1 else torch.cat(buffers)).numpy())


def flat_bytes(tensor):
    """A tensor's bytes as a flat tensor; if it has holes, those of a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def not_finite(tensors, names):
    """The first of `names` that holds a NaN or an infinity, or None."""
    for name in names:
        tensor = tensors.get(name)
        if tensor is not None and tensor.is_floating_point() and tensor.element_size() > 1:
            for piece in tensor.detach().reshape(-1).split(CHECKED_ELEMENTS):
                # the sum alone may overflow
                if not piece.sum().isfinite() and not piece.isfinite().all():
                    return name
    return None
