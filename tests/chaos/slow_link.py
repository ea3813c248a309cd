"""python slow_link.py --whole DEVICE | ONE OTHER DELAY LOSS: a slow, lossy cable between two interfaces.

Each frame that comes out of one interface goes into the other DELAY seconds later, or is lost with the
probability LOSS. First every device that sends through the cable must send whole frames (--whole): those that
a kernel hands to a network card, longer than one and without a checksum, are no frames of a cable.
"""
import contextlib
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import sys
import time
from array import array

SIOCETHTOOL = 0x8946
CHECKSUMS, TSO, GSO, GRO = 0x17, 0x1F, 0x24, 0x2C  # what `ethtool -K DEVICE tx off tso off ...` sets
OUTGOING = 4
LONGEST_BYTES = 1 << 16


def send_whole_frames(device):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for setting in (CHECKSUMS, TSO, GSO, GRO):
            value = array("I", [setting, 0])
            fcntl.ioctl(any_socket, SIOCETHTOOL,
                        struct.pack("16sQ8x", device.encode(), value.buffer_info()[0]))


def carry(names, delay, loss):
    ends, waiting, count = [], [], itertools.count()
    for name in names:
        ends.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))  # all protocols
        ends[-1].bind((name, 0))
        ends[-1].setblocking(False)
    print("carries", flush=True)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                end.send(frame)
        for end in select.select(ends, [], [], max(0, waiting[0][0] - now) if waiting else None)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame, (_, _, kind, *_) = end.recvfrom(LONGEST_BYTES)
                    if kind != OUTGOING and random.random() >= loss:
                        other = ends[1 - ends.index(end)]
                        heapq.heappush(waiting, (time.monotonic() + delay, next(count), other, frame))


if __name__ == "__main__":
    if sys.argv[1] == "--whole":
        send_whole_frames(sys.argv[2])
    else:
        carry(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]))
