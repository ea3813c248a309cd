"""Machines made of namespaces: each has a network, processes, mounts and a name of its own.

A cut link is silence, as with a dead switch: no connection is closed, no process is told.
"""
import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from jobs import children

NET = "10.213.7"
INIT = "hostname $1; echo up; exec sleep 100000"                    # process 1 of a host


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Hosts:
    """`count` network namespaces around a switch that is one too, beside the machine's own network."""

    def __init__(self, count):
        self.mark = f"chaos{os.getpid()}"
        self.numbers = range(1, count + 1)
        self.switch = f"{self.mark}sw"
        self.inits = {}

    def name(self, i):
        return f"{self.mark}n{i}"

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self):
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        names = "".join(f"{NET}.{i} {self.name(i)}\n" for i in self.numbers)
        addresses = {}
        for i in self.numbers:
            host = self.name(i)
            ip("netns", "add", host)
            folder = Path("/etc/netns", host)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            ip("-n", self.switch, "link", "add", f"p{i}", "type", "veth", "peer", "eth0", "netns", host)
            ip("-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
            ip("-n", host, "addr", "add", f"{NET}.{i}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
            addresses[i] = ip("-n", host, "-o", "link", "show", "eth0").split("ether ")[1].split()[0]
        for i in self.numbers:  # so that a cut is silence, and no "host unreachable"
            for j in set(self.numbers) - {i}:
                ip("-n", self.name(i), "neigh", "replace", f"{NET}.{j}", "lladdr", addresses[j],
                   "dev", "eth0", "nud", "permanent")

    def __exit__(self, *_):
        for i in list(self.inits):
            self.power_off(i)
        for name in [*map(self.name, self.numbers), self.switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")

    def cut(self, i):
        ip("-n", self.switch, "link", "set", f"p{i}", "nomaster")

    def heal(self, i):
        ip("-n", self.switch, "link", "set", f"p{i}", "master", "br0")

    def power_off(self, i):
        """All its processes die at once, as with its power; the next command finds it booted again."""
        init = self.inits.pop(i)
        init.kill()
        init.wait()
        init.stdout.close()

    def on(self, i):
        """The command that runs another one on that host."""
        if i not in self.inits:
            self.inits[i] = subprocess.Popen(
                ["ip", "netns", "exec", self.name(i), "unshare", "--uts", "--pid", "--fork", "--mount-proc",
                 "--kill-child", "sh", "-c", INIT, "sh", self.name(i)], stdout=subprocess.PIPE)
            self.inits[i].stdout.readline()
        return ["nsenter", "-t", str(children(self.inits[i].pid)[0]), "--net", "--uts", "--pid", "--mount",
                "--wd=" + os.getcwd(), "--"]
