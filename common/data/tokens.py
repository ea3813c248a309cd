"""Samples for a language model, from a file of text or from files of tokens as nanoGPT writes them.

    --dataset text:128 --data-dir FILE                         # each byte is a token; the last tenth tests
    --dataset tokens:1024 --data-dir DIR --vocab-size 50304    # DIR/train.bin and DIR/val.bin

Files of tokens stay on disk, however large. DIR/meta.json may tell {"vocab_size": 50304, "dtype": "uint32"}.
Without it numbers have 16 bits, or 32 if the vocabulary needs them. meta.pkl is a pickle: it is never opened.
"""
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import torch

from common.data.synthetic import Data
from common.errors import UserError, one_line
from common.sampler import hash_seed

DEFAULT_LENGTH = 128    # tokens per sample; text:LENGTH and tokens:LENGTH change it
TEST_PART = 10          # the last 1/10 of a text is the test set
MOST_ZEROS = 0.01       # share of bytes 0 in a text; random bytes have 0.004, 16-bit tokens 0.04 or more
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BLOCK, BLOCKS = 2**16, 256  # bytes and number of the parts of a file that are looked at when a run starts


class Windows:
    """Sample i is tokens i*L to i*L+L of a file; its target is the L tokens that begin one later.

    With a seed they begin at another place in each epoch of the training, so that a token gets every context,
    as with nanoGPT's windows at random places. Each epoch still reads every token once: the file is then a
    ring, and one window leads from its end to its beginning.
    """

    in_memory = True

    def __init__(self, numbers, length, vocab, path, seed=None):
        self.numbers, self.length, self.vocab, self.path, self.seed = numbers, length, vocab, path, seed
        self.shape, self.tokens = (length,), length

    def __len__(self):
        return max(0, (len(self.numbers) - 1) // self.length)

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y), both [samples, length]; `augment` moves the windows as (seed, epoch) say."""
        starts = np.asarray(ids, dtype=np.int64).reshape(-1, 1) * self.length
        if augment and self.seed is not None:
            starts += hash_seed("windows", self.seed, epoch) % self.length
        places = (starts + np.arange(self.length + 1)) % (len(self) * self.length + 1)
        found = torch.from_numpy(np.asarray(self.numbers)[places].astype(np.int64))
        if found.numel() and found.max() >= self.vocab:
            raise too_high(self.path, int(found.max()), self.vocab)
        return found[:, :-1].clone(), found[:, 1:].clone()  # a task may change one of them in place


def length_of(opts):
    """LENGTH of `text:LENGTH`: how many tokens a sample has."""
    name, _, size = opts.dataset.partition(":")
    if size and not re.fullmatch("[1-9][0-9]{0,5}", size):
        raise UserError(f"dataset {name}:{size}: the length of a sample is a number from 1 to 999999\n"
                        f"for example {name}:{DEFAULT_LENGTH}")
    return int(size or DEFAULT_LENGTH)


# ---- text ----
def text(opts):
    """The file that --data-dir names."""
    length, path = length_of(opts), Path(opts.data_dir)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"dataset text reads one file, but --data-dir {path}: {error.strerror}\n"
                        "give --data-dir FILE, any text file") from error
    if len(content) < (least := TEST_PART * (length + 1)):
        raise UserError(f"dataset text: {path} has {len(content):,} bytes, "
                        f"samples of {length} need {least:,} or more\n"
                        "give a longer file, or a shorter --dataset text:LENGTH")
    if (zeros := content.count(0)) > len(content) * MOST_ZEROS:
        raise UserError(f"dataset text: {path} is no text: {zeros:,} of its {len(content):,} bytes are 0, "
                        "as in numbers of 16 bits or more\n"
                        "every byte is one token; for a file of tokens: "
                        "--dataset tokens:LENGTH --data-dir FOLDER")
    numbers, cut = np.frombuffer(content, np.uint8), len(content) - len(content) // TEST_PART
    parts = [Windows(part, length, 256, path) for part in (numbers[:cut], numbers[cut:])]
    fingerprint = hashlib.sha256(f"text {length} {TEST_PART} ".encode() + content).hexdigest()
    return Data(*parts, known_classes=256, vocab=256, fingerprint=fingerprint)


# ---- tokens ----
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
        parts.append(Windows(np.memmap(path, DTYPES[dtype], "r"), length, vocab, path, opts.seed))
    return Data(*parts, known_classes=vocab, vocab=vocab, fingerprint=digest.hexdigest())


def read_meta(folder, asked):
    """(vocabulary, dtype), from --vocab-size and meta.json."""
    path, facts = folder / "meta.json", {}
    if path.is_file():
        try:
            facts = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
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
    if dtype not in [*DTYPES]:
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
