"""The bytes of one safetensors file in one host buffer, which is allocated once and serves every save.

Names, shapes and types come from the live net. A file whose header is not exactly ours is refused.
"""
import bisect
import contextlib
import ctypes
import json
import mmap
from math import prod

import torch

from common.checkpoint.files import Damaged, parse_json
from common.errors import UserError

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
          torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
          torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
LARGE = 1 << 14     # bytes: from here on a plain memmove beats torch's copy
# madvise: a child gets zeros. Shared pages would be copied one by one in the first save after a fork. Without
# a mapping (MADV_DONTFORK), a child that drops the buffer would unmap what it has placed there since.
WIPE_ON_FORK = 18
POPULATE_WRITE = 23  # madvise: all pages at once
TOUCHED_BYTES = 1 << 26  # at once
LIBC = ctypes.CDLL(None)
CHECKED_ELEMENTS = 1 << 22   # elements checked at once: bounds the memory of the check


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
    for name, entry in parse_json(data[8:], f"{file_name}: its header", ours=False).items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not (isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**62 for n in shape)
                and isinstance(entry.get("dtype"), str) and entry["dtype"] in known):
            raise Damaged(f"{file_name}: {name[:80]} is {str(entry)[:100]}")
        tensors[name] = known[entry["dtype"]], tuple(shape)
    header, places = lay_out(tensors)
    if header != data:
        raise Damaged(f"{file_name}: its header is written differently")
    return places


class TensorFile:
    """One file's header, places and host buffer; `open` allocates, `copy` fills, `wait` before reading."""

    def __init__(self, tensors):
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
                raise UserError(
                    f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}: it cannot be saved\n"
                    "keep such tensors out of the net's parameters and buffers (persistent=False)")
        self.header, self.places = lay_out({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
        self.size = max((start + size for start, size, *_ in self.places.values()), default=len(self.header))
        self.gpus = {t.device for t in tensors.values() if t.is_cuda}
        self.buffer = self.bytes = self.stream = self.copied = None
        self.views = {}

    def open(self):
        """Allocates the buffer, once.

        Not in huge pages: they make the copy 5 % faster, but finding them may take 3 s/GB.
        """
        if self.buffer is None:
            memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # unknown to this kernel: then that save is slower
                memory.madvise(WIPE_ON_FORK)
            self.buffer, self.bytes = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
            self.views = {name: self.buffer[at:at + size].view(dtype).view(shape)
                          for name, (at, size, dtype, shape) in self.places.items()}
            self.bytes[:len(self.header)] = self.header
            if len(self.gpus) == 1:
                self._pin(*self.gpus)
        return self

    def touch(self):
        """Asks the kernel for all pages at once, and changes none; an older kernel does nothing."""
        for at in range(0, self.size, TOUCHED_BYTES):
            start, length = self.buffer.data_ptr() + at, min(TOUCHED_BYTES, self.size - at)
            LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), POPULATE_WRITE)

    def _pin(self, gpu):
        """Page-locked where the driver allows it. (torch's own pinned memory comes in powers of two.)"""
        if int(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), self.size, 0)) == 0:
            self.stream, self.copied = torch.cuda.Stream(gpu), torch.cuda.Event()
        else:
            with contextlib.suppress(RuntimeError):  # the next kernel would raise the refusal: let this one
                torch.zeros(1, device=gpu)

    @torch.no_grad()
    def copy(self, tensors):
        """The one copy that training waits for. Of a GPU's tensors it is only begun: `wait` before you read.

        An update waits for it, and it waits for nothing: the weights are whole (training/updates.py).
        """
        self.open()
        base, targets, sources = self.buffer.data_ptr(), [], []
        for name, (at, size, dtype, shape) in self.places.items():
            tensor = tensors[name].detach()
            if tensor.dtype != dtype or tensor.shape != shape:
                now = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise RuntimeError(f"{name} was {dtype} {tuple(shape)}, now {now}")
            if size >= LARGE and not tensor.is_cuda and tensor.is_contiguous() and not tensor.is_complex():
                ctypes.memmove(base + at, tensor.data_ptr(), size)
            else:
                targets.append(self.views[name])
                sources.append(tensor)
        if self.stream is None:
            if targets:
                torch._foreach_copy_(targets, sources)
            return
        with torch.cuda.stream(self.stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
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
        self.header, self.places, self.size, self.views = image.header, image.places, image.size, tensors
        self.names, self.starts = list(image.places), [at for at, *_ in image.places.values()]
        self.bytes = self

    def __len__(self):
        return self.size

    def __getitem__(self, span):
        """Without a copy where the bytes lie in one tensor of this machine's memory."""
        head = bytearray(self.header[span])
        found = [torch.frombuffer(head, dtype=torch.uint8)] if head else []
        for i in range(max(0, bisect.bisect_right(self.starts, span.start) - 1), len(self.names)):
            if self.starts[i] >= span.stop:
                break
            low, high = max(0, span.start - self.starts[i]), span.stop - self.starts[i]
            found.append(flat_bytes(self.views[self.names[i]])[low:high].cpu())
        return memoryview((found[0] if len(found) == 1 else torch.cat(found)).numpy())


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
