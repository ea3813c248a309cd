"""A bar below the lines, on a terminal or with --progress on."""

import shutil

CHARACTERS = 10
ERASE = "\r\x1b[K"  # the bar's line is erased first: other processes may have written over it


class Bar:
    """Lines, and below them a bar of the newest step."""

    def __init__(self, out):
        self.out = out
        self.bar = ""

    def step(self, text, share):
        """Show a step in the bar, which is full when all of the run is done."""
        bar = f"{share:4.0%}|{'█' * int(share * CHARACTERS):{CHARACTERS}}| {text}"
        self.bar = bar[: shutil.get_terminal_size().columns - 1]
        self.write("")

    def write(self, text):
        self.out.write(ERASE + text + self.bar)

    def close(self):
        self.bar = ""
        self.write("")
