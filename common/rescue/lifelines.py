"""Rank 0 has a connection to each other rank, a lifeline: the kernel ends it with either process.

From a death to its words: the line ends, and `lost` is set; rank 0 ends its other lines, so all ranks know.
How a process of this machine was killed is known to its launcher, a moment later (`find_killed`).
"""

import os
import socket
import time
from contextlib import suppress

from common.place import how_killed
from common.rescue.alarm import DEATH_SECONDS, PEER_SECONDS, Alarm
from common.world import lifelines


class Lifelines:
    """This rank's connections; `processes` are those of all ranks, each as `this_process` tells it."""

    def __init__(self, world, processes):
        self.machine = processes[world.rank]["machine"]
        self.processes = processes
        self.lost = Alarm()
        self.killed = None  # (rank, how) of one of this machine
        self.received = {}  # {line: the first part of its next message}
        self.lines = lifelines(world.store, world.rank, world.size) if world.store else []
        for line in self.lines:
            os.register_at_fork(after_in_child=line.close)  # a process for loading must not keep it open

    def tell(self, message):
        """Send a message: rank 0 to all, another rank to rank 0."""
        for line in self.lines:
            with suppress(OSError):
                line.send(f"{message}\n".encode(), socket.MSG_DONTWAIT)

    def hear(self, line):
        """Receive the messages that have come whole over a line; None if it has ended."""
        data = b""
        with suppress(OSError):
            data = line.recv(1 << 16)
        if not data:
            return None
        *whole, self.received[line] = (self.received.get(line, b"") + data).split(b"\n")
        return [message.decode() for message in whole]

    def lose(self):
        """Let all ranks know that another one has ended."""
        if self.lost.is_set():
            return
        self.lost.sound(PEER_SECONDS)
        for line in self.lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self.find_killed(DEATH_SECONDS)

    def find_killed(self, seconds=0.0):
        """Find a rank of this machine that was killed, if there is one; its launcher knows it late."""
        deadline = time.monotonic() + seconds
        while not self.killed:
            for rank, process in enumerate(self.processes):
                how = how_killed(process["pid"]) if process["machine"] == self.machine else ""
                if how:
                    self.killed = rank, how
            if time.monotonic() >= deadline:
                break
            time.sleep(0.002)
        return self.killed
