"""Samples for a language model: tokens of a file, and targets that begin one later.

--dataset text:128 --data-dir FILE                         # each byte is a token; the last tenth tests
--dataset tokens:1024 --data-dir DIR --vocab-size 50304    # DIR/train.bin and DIR/val.bin, on disk
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.data import Samples, data_of
from common.errors import UserError
from common.sampler import hash_seed


# ---- samples for a language model ----
def text(opts):
    """Read the file that --data-dir names: each byte is a token; the last tenth is the test set."""
    numbers = np.frombuffer(Path(opts.data_dir).read_bytes(), np.uint8)
    cut = len(numbers) - len(numbers) // 10
    return windows(numbers[:cut], numbers[cut:], opts, 256)


def tokens(opts):
    """Map DATA_DIR/train.bin and val.bin: numbers of 16 bits, or of 32 if the vocabulary needs them."""
    vocab = opts.vocab_size  # without it the first token is refused
    dtype = "<u2" if vocab <= 2**16 else "<u4"
    train, test = [np.memmap(Path(opts.data_dir, name), dtype, "r") for name in ("train.bin", "val.bin")]
    return windows(train, test, opts, vocab, move=True)


def windows(train, test, opts, vocab, move=False):
    """Cut both files into samples of so many tokens: text:LENGTH and tokens:LENGTH."""
    samples = Windows(train, opts, vocab, ring=True, move=move)
    return data_of(opts, samples, Windows(test, opts, vocab), vocab, vocab)


BLOCK_TOKENS = 2**15  # that are hashed together when a run starts,


BLOCKS = 256  # at so many places of a file


class Windows(Samples):
    """Sample i is tokens i*L to i*L+L of a file; its target is the L tokens that begin one later.

    To train on, the file is a ring: one window leads from its end to its beginning. An epoch reads every
    token once, but for fewer than L, which it reads twice: the last window ends where the first has begun.
    If they move, the windows begin at another place in each epoch, so that a token gets every context, as
    with nanoGPT's windows at random places. A test does not join end and beginning: fewer than L tokens are
    left.
    """

    def __init__(self, numbers, opts, vocab, ring=False, move=False):
        self.numbers = numbers
        self.length = int(opts.dataset.partition(":")[2] or 128)
        self.move = move
        last = len(numbers) + self.length - 1 if ring else max(0, len(numbers) - 1)
        super().__init__(last // self.length, opts, vocab)

    def fetch(self, ids, epoch=0, augment=False):
        """Return (x, y), both [samples, length]; `augment` moves the windows as (seed, epoch) say."""
        starts = np.asarray(ids, dtype=np.int64) * self.length
        if augment and self.move:
            starts += hash_seed("windows", self.seed, epoch)
        places = starts[:, None] + np.arange(self.length + 1)
        words = np.asarray(self.numbers)[places % len(self.numbers)]
        words = torch.from_numpy(words.astype(np.int64))
        if words.max() >= self.classes:
            raise UserError(
                f"the data holds token {words.max():,}, but the vocabulary has {self.classes:,}\n"
                "give the --vocab-size it was written with"
            )
        return words[:, :-1].clone(), words[:, 1:].clone()  # a task may change one of them in place

    def contents(self):
        last = max(0, len(self.numbers) - BLOCK_TOKENS)
        for start in np.linspace(0, last, BLOCKS, dtype=np.int64):
            yield self.numbers[start : start + BLOCK_TOKENS].tobytes()


def refuse_unshifted(batch, name):
    """Refuse labels that are the words themselves: here the net would learn to copy its input."""
    match batch:
        case {"input_ids": Tensor() as words, "labels": Tensor() as labels} if words.shape == labels.shape:
            real = labels >= 0
            if real.sum() > 1 and torch.equal(words[real], labels[real]):
                raise UserError(
                    f"{name}: labels are the input_ids, which a model of Hugging Face shifts; "
                    "--task tokens does not\n"
                    "let collate(samples) shift them: labels[t] is input_ids[t + 1], -100 at the end; "
                    "or take the model's own loss: --task path/to/file.py:function"
                )
