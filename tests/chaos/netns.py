"""python -m tests.chaos.netns [--plain]: three "hosts" lose processes, links and each other; how long until
the next step, with launch/torchrun.py or plain torchrun. Needs root, iproute2, util-linux.

Every host has a network, processes, mounts and a name of its own. A cut link is silence, as with a dead
switch: no connection is closed, nobody is told. No sample may be missed or made twice, and no step be lost.
"""
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jobs import PACED, ROOT, Jobs, audit, children, events, lives, reached, until

from common.ledger import summarize

NET = "10.213.7"
HANG = 15                                                           # --hang-timeout
INIT = "hostname $1; echo up; exec sleep 100000"                    # process 1 of a host


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """`count` network namespaces around a switch that is one too; nothing is added to the machine's own
    network.
    """

    def __init__(self, count):
        self.mark, self.count = f"chaos{os.getpid()}", count
        self.switch, self.inits = f"{self.mark}sw", {}

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
            shown = subprocess.run(["ip", "-n", host, "-o", "link", "show", "eth0"], check=True,
                                   capture_output=True, text=True)
            addresses[i] = shown.stdout.split("ether ")[1].split()[0]
        for i in numbers:  # so that a cut is silence, and no "host unreachable"
            for j in set(numbers) - {i}:
                ip("-n", self.name(i), "neigh", "replace", f"{NET}.{j}", "lladdr", addresses[j], "dev",
                   "eth0", "nud", "permanent")

    def __exit__(self, *_):
        for init in self.inits.values():
            init.kill()
            init.wait()
            init.stdout.close()
        for name in [*(self.name(i) for i in range(1, self.count + 1)), self.switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")

    def cut(self, i):
        ip("-n", self.switch, "link", "set", f"p{i}", "nomaster")

    def heal(self, i):
        ip("-n", self.switch, "link", "set", f"p{i}", "master", "br0")

    def on(self, i):
        """The command that runs another one on that host."""
        if i not in self.inits:
            self.inits[i] = subprocess.Popen(
                ["ip", "netns", "exec", self.name(i), "unshare", "--uts", "--pid", "--fork", "--mount-proc",
                 "--kill-child", "sh", "-c", INIT, "sh", self.name(i)], stdout=subprocess.PIPE)
            self.inits[i].stdout.readline()
        return ["nsenter", "-t", str(children(self.inits[i].pid)[0]), "--net", "--uts", "--pid", "--mount",
                "--wd=" + os.getcwd(), "--"]


class Job:
    """One training on up to three hosts, and what is done to it."""

    def __init__(self, jobs, hosts, run, plain):
        self.jobs, self.hosts, self.run, self.plain, self.agents = jobs, hosts, Path(run), plain, {}
        self.endpoint, self.env = f"{NET}.1:29400", {"PACE": "0.1"}
        if not plain:
            self.store = jobs.start(ROOT / "launch" / "store.py", f"{NET}.1:0", cold=True, within=hosts.on(1))
            until(lambda: "store on" in self.store.output, "the store")
            self.endpoint = self.store.output.split("store on ")[1].strip()

    def start(self, *numbers, meeting=None):
        flags = ["--nnodes=1:3", "--max_restarts=1000", "--rdzv_backend=c10d", f"--rdzv_id={self.run.name}",
                 f"--rdzv_endpoint={self.endpoint}"] + ["--rdzv_conf=is_host=0"] * (not self.plain)
        launcher = "torchrun" if self.plain else ROOT / "launch" / "torchrun.py"
        for i in numbers:
            own = meeting(i) if meeting else [*flags, f"--local_addr={NET}.{i}"]
            hang = [] if self.plain else [f"--hang-timeout={HANG}"]
            self.agents[i] = self.jobs.start(
                launcher, "--nproc_per_node=1", *own, ROOT / "train_ddp.py", *PACED, f"--run-dir={self.run}",
                "--epochs=9999", *hang, cold=True, within=self.hosts.on(i), **self.env)

    def launcher(self, i):
        return children(self.agents[i].pid)[0]  # nsenter waits for it

    def kill(self, i, number=signal.SIGKILL):
        os.kill(self.launcher(i), number)

    def worker(self, i, number):
        """Signals the rank on that host; its number among the host's processes is not ours."""
        os.kill(max(children(self.launcher(i))), number)

    def trains(self, world, after):
        """The moment of the first step of a life of so many ranks that began after that moment."""
        found, told = [life for life in lives(self.run) if life["t"] > after], events(self.run, "first_step")
        return next((step["t"] for life in found if life["world"] == world
                     for step in told if step["t"] > life["t"]), None)

    def event(self, what, world, act):
        began = time.time()
        act()
        try:
            then = until(lambda: self.trains(world, began) or self.all_ended() and -1, what, 180)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(job.output[-3000:] for job in self.agents.values())
                                 ) from None
        print(f"| {what} | {'all agents have ended' if then < 0 else f'{then - began:.1f} s'} | "
              f"{', '.join(f'{part} {seconds:.1f}' for part, seconds in self.gap().items())} |", flush=True)
        if then < 0:
            raise SystemExit(1)
        step = reached(self.run)
        until(lambda: reached(self.run) > step + 5, "some steps more")

    def gap(self):
        """Where the time went, by the ledger."""
        return summarize(self.run)["lives"][-1]["gap"]

    def all_ended(self):
        return all(agent.poll() is not None for agent in self.agents.values())

    def end(self):
        began = time.time()
        for i, agent in self.agents.items():
            if agent.poll() is None:
                self.kill(i, signal.SIGTERM)
        codes = [agent.wait(60) for agent in self.agents.values()]
        counts = audit(self.run)
        print(f"| SIGTERM to all | {time.time() - began:.1f} s, codes {codes} | {counts} |", flush=True)
        assert not any(counts.values())


def main(arguments):
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        print("skipped: needs root, iproute2 and util-linux")
        return 0
    plain = arguments == ["--plain"]
    with tempfile.TemporaryDirectory(prefix="netns-") as folder, Hosts(3) as hosts, Jobs(folder) as jobs:
        job = Job(jobs, hosts, Path(folder) / "elastic", plain)
        print("| event | next step | where the time went |\n|---|---|---|")
        job.event("start, two of 1:3", 2, lambda: job.start(1, 2))
        if not plain:  # it ends the job, see tests/chaos/plain.py
            job.event("late join", 3, lambda: job.start(3))
        everybody = len(job.agents)
        for i in (2, 1):
            job.event(f"kill -9 worker of host {i}", everybody, lambda i=i: job.worker(i, signal.SIGKILL))
        job.event("kill -9 launcher of the last host", everybody - 1, lambda: job.kill(everybody))
        if not plain:
            job.event("started again", 3, lambda: job.start(3))
            job.event("SIGTERM to the launcher of host 3", 2, lambda: job.kill(3, signal.SIGTERM))
            job.event("started again", 3, lambda: job.start(3))
        job.event("kill -9 launcher of host 1", everybody - 1, lambda: job.kill(1))
        job.event("started again", everybody, lambda: job.start(1))
        job.event("SIGSTOP worker of host 2", everybody, lambda: job.worker(2, signal.SIGSTOP))
        job.event("link of host 2 cut", everybody - 1, lambda: hosts.cut(2))
        job.event("healed", everybody, lambda: hosts.heal(2))
        job.end()
        fixed = Job(jobs, hosts, Path(folder) / "fixed", plain)
        fixed.event("fixed numbers, start", 2, lambda: fixed.start(1, 2, meeting=lambda i: [
            "--nnodes=2", f"--node_rank={i - 1}", f"--master_addr={NET}.1", "--master_port=29555",
            "--max_restarts=1000", f"--local_addr={NET}.{i}"]))
        fixed.event("fixed numbers, kill -9 worker", 2, lambda: fixed.worker(2, signal.SIGKILL))
        fixed.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
