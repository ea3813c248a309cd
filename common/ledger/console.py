"""Lines on stdout, or one bar below them on a terminal."""
import os
import sys
import time

from common.errors import Outlet

DRAW_EVERY_SECONDS = 0.1
BAR = 10                 # characters


class Console:
    """The bar counts the steps of the whole run; other lines go above it."""

    def __init__(self, opts, step, total):
        self.out, self.total = Outlet(sys.stdout), total
        self.text, self.length, self.drawn, self.at = "", 0, 0.0, step
        able = self.out.isatty() and os.environ.get("TERM") != "dumb"
        self.bar = opts.progress == "on" or opts.progress == "auto" and able

    def step(self, step, text, short=""):
        """Show a step: `text` as a line, or `short` in the bar."""
        if not self.bar:
            return self.line(text)
        self.at, self.text = step, short or text
        if time.monotonic() - self.drawn > DRAW_EVERY_SECONDS:
            self._draw()

    def line(self, text):
        self._clear()
        self.out.write(text + "\n")
        self._draw()
        self.out.flush()

    def close(self):
        """A bar that is full stays; the next life draws one that is not."""
        if self.text and self.at >= self.total:
            self._draw()
            self.out.write("\n")
        else:
            self._clear()
        self.text, self.length = "", 0
        self.out.flush()

    def _draw(self):
        if not self.text:
            return
        share = min(1.0, self.at / self.total) if self.total else 0.0
        full = int(share * BAR)
        text = f"{share:4.0%}|{'█' * full}{' ' * (BAR - full)}| {self.text}"[:self._columns() - 1]
        self.out.write("\r" + text.ljust(self.length))  # other processes may have written over it
        self.out.flush()
        self.length, self.drawn = len(text), time.monotonic()

    def _clear(self):
        if self.length:
            self.out.write("\r" + " " * self.length + "\r")
            self.length = 0

    def _columns(self):
        try:  # some terminals report a width of 0 (serial lines)
            return os.get_terminal_size(self.out.fileno()).columns or 80
        except (OSError, ValueError, AttributeError):
            return 200  # no terminal, but --progress on
