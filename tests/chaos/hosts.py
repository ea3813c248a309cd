"""Machines made of namespaces: each has a network, processes, mounts and a name of its own.

A cut link is silence, as with a dead switch: no connection is closed, nobody is told.
"""
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from jobs import children

NET = "10.213.7"
INIT = "hostname $1; echo up; exec sleep 100000"                    # process 1 of a host
CABLE = [sys.executable, str(Path(__file__).with_name("slow_link.py"))]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """`count` network namespaces around a switch that is one too; nothing is added to the machine's own
    network.
    """

    def __init__(self, count):
        self.mark, self.count = f"chaos{os.getpid()}", count
        self.switch, self.inits, self.cables = f"{self.mark}sw", {}, {}

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
        numbers, addresses = range(1, self.count + 1), {}
        for i in numbers:
            host = self.name(i)
            ip("netns", "add", host)
            names = "".join(f"{NET}.{j} {self.name(j)}\n" for j in numbers)
            folder = Path("/etc/netns", host)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            ip("-n", self.switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns",
               host)
            ip("-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
            ip("-n", host, "addr", "add", f"{NET}.{i}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", host, "link", "set", device, "up")
            subprocess.run(["ip", "netns", "exec", host, *CABLE, "--whole", "eth0"], check=True)
            shown = subprocess.run(["ip", "-n", host, "-o", "link", "show", "eth0"], check=True,
                                   capture_output=True, text=True)
            addresses[i] = shown.stdout.split("ether ")[1].split()[0]
        for i in numbers:  # so that a cut is silence, and no "host unreachable"
            for j in set(numbers) - {i}:
                ip("-n", self.name(i), "neigh", "replace", f"{NET}.{j}", "lladdr", addresses[j], "dev",
                   "eth0", "nud", "permanent")

    def __exit__(self, *_):
        for process in [*self.inits.values(), *self.cables.values()]:
            process.kill()
            process.wait()
            process.stdout.close()
        for name in [*(self.name(i) for i in range(1, self.count + 1)), self.switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")

    def cut(self, i):
        ip("-n", self.switch, "link", "set", f"p{i}", "nomaster")

    def heal(self, i):
        if cable := self.cables.pop(i, None):
            cable.kill()
            cable.wait()
            cable.stdout.close()
            ip("-n", self.switch, "link", "del", f"s{i}")
        ip("-n", self.switch, "link", "set", f"p{i}", "master", "br0")

    def slow(self, i, delay, loss):
        """Each frame to and from the host comes so many seconds late, or with this probability never."""
        self.cut(i)
        ip("-n", self.switch, "link", "add", f"s{i}", "type", "veth", "peer", "name", f"t{i}")
        ip("-n", self.switch, "link", "set", f"t{i}", "master", "br0", "up")
        ip("-n", self.switch, "link", "set", f"s{i}", "up")
        self.cables[i] = subprocess.Popen(["ip", "netns", "exec", self.switch, *CABLE, f"p{i}", f"s{i}",
                                           str(delay), str(loss)], stdout=subprocess.PIPE)
        self.cables[i].stdout.readline()

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
