"""The bytes of one safetensors file in one host buffer: copied into, written out, read into, copied out of.

Names, shapes and dtypes come from the live net, never from a file: a file either has exactly these header bytes or is
refused, so nothing is ever allocated because a file said so. The buffer is allocated once and serves every save.
"""
import hashlib
import json

import torch

from common.files import Damaged

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


class Image:
    def __init__(self, tensors):
        # Wide types first, then by name: every tensor is aligned, and equal states are equal bytes.
        self.names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
        header, at = {}, 0
        for name in self.names:
            size = tensors[name].numel() * tensors[name].element_size()
            header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 64)                      # the format pads with spaces; data starts on a cache line
        self.header = len(text).to_bytes(8, "little") + text
        on_gpu = any(t.is_cuda for t in tensors.values())
        self.buffer = torch.empty(len(self.header) + at, dtype=torch.uint8, pin_memory=on_gpu)
        self.bytes = memoryview(self.buffer.numpy())
        self.bytes[:len(self.header)] = self.header
        body = self.buffer[len(self.header):]
        self.views = {n: body[slice(*header[n]["data_offsets"])].view(tensors[n].dtype).view(tensors[n].shape) for n in self.names}

    def layout(self):
        """A number that two ranks share exactly when their nets and optimizers have the same names, shapes and types."""
        return int.from_bytes(hashlib.sha256(self.header).digest()[:7], "little")

    @torch.no_grad()
    def copy(self, tensors):
        """The one copy the training loop pays for."""
        torch._foreach_copy_([self.views[n] for n in self.names], [tensors[n].detach() for n in self.names])

    def check_header(self, file_name):
        """After a file was read in: it must describe exactly this net."""
        found = bytes(self.bytes[:len(self.header)])
        if found == self.header:
            return
        length = int.from_bytes(found[:8], "little")
        try:
            theirs = json.loads(found[8:8 + length]) if 0 < length <= len(found) - 8 else None
        except (ValueError, RecursionError):
            theirs = None
        self.bytes[:len(self.header)] = self.header
        if not isinstance(theirs, dict):
            raise Damaged(f"{file_name}: its header is not the one this model and optimizer need ({length:,} bytes)")
        ours = json.loads(self.header[8:])
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise Damaged(f"{file_name}: {name} is {_shape(theirs.get(name))}, this run has {_shape(ours.get(name))}")
        raise Damaged(f"{file_name}: its header is written differently")


def _shape(entry):
    return f"{entry.get('dtype')}{entry.get('shape')} at {entry.get('data_offsets')}" if isinstance(entry, dict) else "absent"
