"""Rank 0 has a connection to each other rank, a lifeline: the kernel ends it with either process.

From a death to its words: the line ends, and `lost` is set; rank 0 ends its other lines, so all ranks know.
How a process of this machine has ended is known to its launcher, a moment later (`find_death`).
"""

import os
import socket
import time
from contextlib import suppress
from typing import NamedTuple

from common.place import end_of
from common.rescue.alarm import Alarm
from common.rescue.seconds import DEATH_SECONDS, PEER_SECONDS
from common.world import lifelines


class Death(NamedTuple):
    """How another rank has ended."""

    words: str = "a process of another machine is gone"
    rank: int = -1
    how: str = ""
    killed: bool = False


class Lifelines:
    """This rank's connections; `processes` are the (pid, host, machine) of all ranks."""

    def __init__(self, world, processes):
        self.machine = processes[world.rank][1:]
        self.processes = processes
        self.lost = Alarm()
        self.death = Death()
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
        self.find_death(DEATH_SECONDS)

    def find_death(self, seconds=0.0):
        """Find how a rank of this machine ended, one that was killed if any; its launcher knows it late."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, (pid, *machine) in enumerate(self.processes):
                ending = end_of(pid) if machine == self.machine else None
                if ending and (ending.killed or not self.death.how):
                    words = f"rank {rank} (pid {pid}) {ending.words}"
                    self.death = Death(words, rank, how=ending.words, killed=ending.killed)
            if self.death.killed or time.monotonic() >= deadline:
                return self.death
            time.sleep(0.002)
