"""A file of text as samples for a language model: bytes are the tokens, so no tokenizer has to be trained."""
import hashlib
import re
from pathlib import Path

import torch

from common.data.synthetic import Source
from common.errors import UserError, one_line

DEFAULT_LENGTH = 128    # tokens per sample of `text`; text:LENGTH changes it
TEST_PART = 10          # the last 1/10 of the file is the test set
MOST_ZEROS = 0.01       # share of bytes 0 in a text; random bytes have 0.004, 16-bit tokens 0.04 or more


class Windows:
    """Sample i is bytes i*L to i*L+L of the text; its target is the L bytes that begin one byte later."""

    in_memory, dtype = True, torch.int64

    def __init__(self, text, length):
        self.text, self.length, self.shape, self.tokens = text, length, (length,), length

    def __len__(self):
        return max(0, (len(self.text) - 1) // self.length)

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y), both [samples, length]."""
        starts = torch.as_tensor(ids, dtype=torch.int64) * self.length
        tokens = self.text[starts[:, None] + torch.arange(self.length + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]


def length_of(opts):
    """LENGTH of `text:LENGTH`: how many tokens a sample has."""
    name, _, size = opts.dataset.partition(":")
    if size and not re.fullmatch("[1-9][0-9]{0,5}", size):
        raise UserError(f"dataset {name}:{size}: the length of a sample is a number from 1 to 999999\n"
                        f"for example {name}:{DEFAULT_LENGTH}")
    return int(size or DEFAULT_LENGTH)


def text(opts):
    """The file that --data-dir names."""
    length, path = length_of(opts), Path(opts.data_dir)
    if not path.is_file():
        raise UserError(f"dataset text reads one file, but --data-dir {opts.data_dir} "
                        f"{'is a folder' if path.is_dir() else 'does not exist'}\n"
                        "give --data-dir FILE, any text file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"dataset text: {path} cannot be read\n{one_line(error)}") from error
    least = TEST_PART * (length + 1)
    if len(content) < least:
        raise UserError(f"dataset text: {path} has {len(content):,} bytes, "
                        f"samples of {length} need {least:,} or more\n"
                        "give a longer file, or a shorter --dataset text:LENGTH")
    if (zeros := content.count(0)) > len(content) * MOST_ZEROS:
        raise UserError(f"dataset text: {path} is no text: {zeros:,} of its {len(content):,} bytes are 0, "
                        "as in numbers of 16 bits or more\n"
                        "every byte is one token; for a file of tokens: "
                        "--dataset tokens:LENGTH --data-dir FOLDER")
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    cut = len(content) - len(content) // TEST_PART
    parts = [Windows(part, length) for part in (tokens[:cut], tokens[cut:])]
    fingerprint = hashlib.sha256(f"text {length} {TEST_PART} ".encode() + content).hexdigest()
    return Source(*parts, classes=256, vocab=256, fingerprint=fingerprint)
