"""Files of tokens for a language model, as nanoGPT writes them: they stay on disk, however large.

    --dataset tokens:1024 --data-dir DIR --vocab-size 50304        # DIR/train.bin and DIR/val.bin

DIR/meta.json may tell {"vocab_size": 50304, "dtype": "uint32"}. Without it numbers have 16 bits, or 32 if the
vocabulary needs them. meta.pkl is a pickle: it is never opened.
"""
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

from common.data.synthetic import Source
from common.data.text import Windows, length_of
from common.errors import UserError, one_line
from common.sampler import hash_seed

DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BLOCK, BLOCKS = 2**16, 256  # bytes and number of the parts of a file that are looked at when a run starts


class TokenWindows(Windows):
    """Windows that follow each other through the file: each epoch reads every token once.

    In training they begin at another place in each epoch, so that a token gets every context, as with
    nanoGPT's windows at random places; the file is then a ring, and one window leads from its end to its
    beginning.
    """

    def __init__(self, path, dtype, length, vocab, seed):
        super().__init__(np.memmap(path, DTYPES[dtype], "r"), length)
        self.path, self.vocab, self.seed = path, vocab, seed

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y), both [samples, length]; `augment` moves the windows as (seed, epoch) say."""
        starts = np.asarray(ids, dtype=np.int64).reshape(-1, 1) * self.length
        if augment:
            starts += hash_seed("windows", self.seed, epoch) % self.length
        places = (starts + np.arange(self.length + 1)) % (len(self) * self.length + 1)
        tokens = torch.from_numpy(np.asarray(self.text)[places].astype(np.int64))
        if tokens.numel() and tokens.max() >= self.vocab:
            raise too_high(self.path, int(tokens.max()), self.vocab)
        return tokens[:, :-1], tokens[:, 1:]


def tokens(opts):
    """DATA_DIR/train.bin and DATA_DIR/val.bin."""
    length, folder = length_of(opts), Path(opts.data_dir)
    vocab, dtype = read_meta(folder, opts.vocab_size)
    digest, parts = hashlib.sha256(f"tokens {length} {vocab} {dtype} ".encode()), []
    for path in (folder / "train.bin", folder / "val.bin"):
        try:
            look(path, dtype, length, vocab, digest)
        except OSError as error:
            raise UserError(f"dataset tokens: {path} cannot be read\n{one_line(error)}") from error
        parts.append(TokenWindows(path, dtype, length, vocab, opts.seed))
    return Source(*parts, classes=vocab, vocab=vocab, fingerprint=digest.hexdigest())


def read_meta(folder, asked):
    """(vocabulary, dtype), from --vocab-size and meta.json."""
    path, facts = folder / "meta.json", {}
    if path.is_file():
        try:
            facts = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} is no JSON object\n{one_line(error)}") from error
    told = facts.get("vocab_size", 0)
    if asked and told and asked != told:
        raise UserError(f"--vocab-size {asked}, but {path} says {told}\nleave out the flag, or mend the file")
    vocab = asked or told
    if type(vocab) is not int or not 0 < vocab <= 2**32:
        pickled = "; meta.pkl is a pickle, and is not opened" if (folder / "meta.pkl").exists() else ""
        raise UserError(f"dataset tokens: the size of the vocabulary is not known{pickled}\n"
                        f'give --vocab-size N, or write {{"vocab_size": N}} into {path}')
    dtype = facts.get("dtype", "uint16" if vocab <= 2**16 else "uint32")
    if dtype not in DTYPES:
        raise UserError(f"{path}: dtype {dtype!r}\nwanted: {' or '.join(DTYPES)}")
    return vocab, dtype


def look(path, dtype, length, vocab, digest):
    """Adds up to BLOCKS blocks of a file to the digest; UserError if they hold no such tokens."""
    size, width = os.path.getsize(path), np.dtype(DTYPES[dtype]).itemsize
    if size % width or size // width <= length:
        raise UserError(f"dataset tokens: {path} has {size:,} bytes: no whole number of {dtype}, or not the "
                        f"{length + 1:,} for one sample\ngive a shorter tokens:LENGTH, or write the dtype "
                        "into meta.json")
    digest.update(f"{size} ".encode())
    last = -(-size // BLOCK) - 1
    with open(path, "rb") as file:
        found = []
        for block in sorted({last * k // (BLOCKS - 1) for k in range(BLOCKS)}):
            file.seek(block * BLOCK)
            found.append(file.read(BLOCK))
            digest.update(found[-1])
    numbers = np.frombuffer(b"".join(found), DTYPES[dtype])
    if dtype == "uint16" and numbers[::2].any() and not numbers[1::2].any():
        raise UserError(f"dataset tokens: every second number of {path} is 0, as in a file of uint32\n"
                        f'write {{"dtype": "uint32", "vocab_size": {vocab}}} into {path.parent}/meta.json')
    if numbers.max() >= vocab:
        raise too_high(path, int(numbers.max()), vocab)


def too_high(path, found, vocab):
    return UserError(f"dataset tokens: {path} holds token {found:,}, but the vocabulary has {vocab:,}\n"
                     "give the --vocab-size it was written with, or its dtype in meta.json")
