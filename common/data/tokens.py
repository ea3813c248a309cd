"""Samples for a language model, from a file of text or from files of tokens as nanoGPT writes them.

    --dataset text:128 --data-dir FILE                         # each byte is a token; the last tenth tests
    --dataset tokens:1024 --data-dir DIR --vocab-size 50304    # DIR/train.bin and DIR/val.bin

Files of tokens stay on disk, however large. DIR/meta.json may tell {"vocab_size": 50304, "dtype": "uint32"}.
Without it numbers have 16 bits, or 32 if the vocabulary needs them. meta.pkl is a pickle: it is never opened.
"""
import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from common.data.splits import Data
from common.errors import UserError
from common.sampler import hash_seed

DEFAULT_LENGTH = 128    # tokens per sample; text:LENGTH and tokens:LENGTH change it
TEST_PART = 10          # the last 1/10 of a text is the test set
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BLOCK = 2**15           # tokens that are hashed together when a run starts,
BLOCKS = 256            # at so many places of a file


class Windows:
    """Sample i is tokens i*L to i*L+L of a file; its target is the L tokens that begin one later.

    To train on, the file is a ring: one window leads from its end to its beginning. An epoch reads every
    token once, but for fewer than L, which it reads twice: the last window ends where the first has begun.
    With a seed the windows begin at another place in each epoch, so that a token gets every context, as with
    nanoGPT's windows at random places. A test does not join end and beginning: fewer than L tokens are left.
    """

    in_memory = True

    def __init__(self, numbers, length, vocab, path, ring, seed=None):
        self.numbers = numbers
        self.length = length
        self.classes = vocab
        self.path = path
        self.seed = seed
        self.ring = ring
        self.shape = (length,)
        self.tokens = length

    def __len__(self):
        if len(self.numbers) <= self.length:
            return 0
        return -(-len(self.numbers) // self.length) if self.ring else (len(self.numbers) - 1) // self.length

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y), both [samples, length]; `augment` moves the windows as (seed, epoch) say."""
        starts = np.asarray(ids, dtype=np.int64).reshape(-1, 1) * self.length
        if augment and self.seed is not None:
            starts += hash_seed("windows", self.seed, epoch)
        places = (starts + np.arange(self.length + 1)) % len(self.numbers)
        words = torch.from_numpy(np.asarray(self.numbers)[places].astype(np.int64))
        if words.numel() and words.max() >= self.classes:
            raise UserError(f"{self.path} holds token {words.max():,}, "
                            f"but the vocabulary has {self.classes:,}\n"
                            "give the --vocab-size it was written with, or its dtype in meta.json")
        return words[:, :-1].clone(), words[:, 1:].clone()  # a task may change one of them in place


def length_of(opts):
    """LENGTH of `text:LENGTH`: how many tokens a sample has."""
    return int(opts.dataset.partition(":")[2] or DEFAULT_LENGTH)


def text(opts):
    """The file that --data-dir names."""
    length = length_of(opts)
    path = Path(opts.data_dir)
    content = path.read_bytes()
    numbers = np.frombuffer(content, np.uint8)
    cut = len(content) - len(content) // TEST_PART
    return Data(train=Windows(numbers[:cut], length, 256, path, ring=True),
                test=Windows(numbers[cut:], length, 256, path, ring=False),
                known_classes=256, vocab=256,
                fingerprint=hashlib.sha256(f"text {length} {TEST_PART} ".encode() + content).hexdigest())


def tokens(opts):
    """DATA_DIR/train.bin and DATA_DIR/val.bin."""
    length = length_of(opts)
    folder = Path(opts.data_dir)
    meta = folder / "meta.json"
    facts = json.loads(meta.read_text()) if meta.is_file() else {}
    vocab = opts.vocab_size or facts.get("vocab_size")
    if not vocab:
        raise UserError("dataset tokens: the size of the vocabulary is not known\n"
                        f'give --vocab-size N, or write {{"vocab_size": N}} into {meta}')
    dtype = facts.get("dtype", "uint16" if vocab <= 2**16 else "uint32")
    digest = hashlib.sha256(f"tokens {length} {vocab} {dtype} ".encode())
    windows = []
    for name in ("train", "val"):
        path = folder / f"{name}.bin"
        numbers = np.memmap(path, DTYPES[dtype], "r")
        digest.update(f"{len(numbers)} ".encode())
        for start in np.linspace(0, max(0, len(numbers) - BLOCK), BLOCKS, dtype=np.int64):
            digest.update(numbers[start:start + BLOCK].tobytes())
        windows.append(Windows(numbers, length, vocab, path, ring=name == "train", seed=opts.seed))
    return Data(*windows, known_classes=vocab, vocab=vocab, fingerprint=digest.hexdigest())
