"""A file of text as samples for a language model: bytes are the tokens, so nothing has to be learned before.
"""
import hashlib
import re
from pathlib import Path

import torch

from common.data.synthetic import Source
from common.errors import UserError, one_line

LENGTH = 128                 # tokens a sample, unless text:LENGTH says so
TEST = 10                    # the last tenth of the file is for testing
ZEROS = 0.01                  # of a text, at most: of random bytes 0.004 are 0, of 16-bit tokens 0.04 or more


class Windows:
    """Sample i is bytes i*L to i*L+L of the text; its target is the same, one byte on: every byte is
    predicted once an epoch.
    """

    in_memory, dtype = True, torch.int64

    def __init__(self, text, length):
        self.text, self.length, self.shape, self.tokens = text, length, (length,), length

    def __len__(self):
        return max(0, (len(self.text) - 1) // self.length)

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y), both [samples, length]."""
        starts = torch.as_tensor(ids, dtype=torch.int64) * self.length
        found = self.text[starts[:, None] + torch.arange(self.length + 1)].long()
        return found[:, :-1], found[:, 1:]


def text(opts):
    """The file that --data-dir names."""
    size = opts.dataset.partition(":")[2]
    if size and not re.fullmatch("[1-9][0-9]{0,5}", size):
        raise UserError(f"dataset text:{size}: the length of a sample is a number from 1 to 999999\nfor example text:{LENGTH}")
    length, path = int(size or LENGTH), Path(opts.data_dir)
    if not path.is_file():
        raise UserError(f"dataset text reads one file, --data-dir is {opts.data_dir}: "
                        f"{'a folder' if path.is_dir() else 'not there'}\ngive --data-dir FILE, any text will do")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"dataset text: {path} cannot be read\n{one_line(error)}") from error
    least = TEST * (length + 1)
    if len(content) < least:
        raise UserError(f"dataset text: {path} has {len(content):,} bytes, samples of {length} want {least:,} or more\n"
                        "give a longer file, or a shorter --dataset text:LENGTH")
    if (zeros := content.count(0)) > len(content) * ZEROS:
        raise UserError(f"dataset text: {path} is no text: {zeros:,} of its {len(content):,} bytes are 0, as in numbers of 16 "
                        "bits or more\nhere every byte is a token; give the text that they were made of")
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    cut = len(content) - len(content) // TEST
    parts = [Windows(part, length) for part in (tokens[:cut], tokens[cut:])]
    fingerprint = hashlib.sha256(f"text {length} {TEST} ".encode() + content).hexdigest()
    return Source(*parts, classes=256, vocab=256, fingerprint=fingerprint)
