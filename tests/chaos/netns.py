"""python -m tests.chaos.netns: two "hosts" with networks of their own, a link that is cut and healed; needs
root and iproute2.

Packets vanish without a word, as with a dead switch: no connection is closed, nobody is told. What must
happen: both sides notice by the time-out, save, and the side with the store goes on alone; healed, the other
one comes back; no sample is missed or made twice, and no step is lost.
"""
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import checks
from tests.chaos.cluster import CONF

from jobs import PACED, ROOT, Jobs, lives, reached, until  # isort: skip  (found once tests.chaos is)

NET = "10.213.7"
TIMEOUT = 8                                                         # --hang-timeout


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """`count` network namespaces around a switch that is one too; nothing is added to the machine's own
    network.
    """

    def __init__(self, count):
        self.mark, self.count = f"chaos{os.getpid()}", count
        self.switch = f"{self.mark}sw"

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
        """The command that runs another one on that host, under that host's name."""
        return ["ip", "netns", "exec", self.name(i), "unshare", "-u", "--", "sh", "-c",
                f'hostname {self.name(i)}; exec "$@"', "sh"]


def main():
    if os.geteuid() or not shutil.which("ip"):
        print("skipped: needs root and iproute2")
        return 0
    with tempfile.TemporaryDirectory(prefix="netns-") as folder, Hosts(2) as hosts, Jobs(folder) as jobs:
        run, began = Path(folder) / "run", time.monotonic()

        def say(text):
            print(f"{time.monotonic() - began:6.1f} s  step {reached(run) if lives(run) else 0:4}  {text}",
                  flush=True)

        def wait(condition, what, deadline=180):
            try:
                until(condition, what, deadline)
            except AssertionError as error:
                raise AssertionError(f"{error}\n" + "\n".join(job.output[-3000:] for job in agents)) from None
            say(what)

        def newest(world):
            return (lives(run) and lives(run)[-1]["world"] == world
                    and reached(run) > lives(run)[-1]["step"] + 5)

        store = jobs.start(ROOT / "launch" / "store.py", f"{NET}.1:0", cold=True, within=hosts.on(1))
        until(lambda: "store on" in store.output, "the store")
        flags = ["--nnodes=1:2", "--nproc_per_node=1", "--max_restarts=1000000", "--rdzv_backend=c10d",
                 "--rdzv_id=netns",
                 f"--rdzv_endpoint={store.output.split('store on ')[1].strip()}",
                 f"--rdzv_conf=is_host=0,{CONF}"]
        training = [ROOT / "train_ddp.py", *PACED, f"--run-dir={run}", "--epochs=60",
                    f"--hang-timeout={TIMEOUT}"]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "eth0", "PACE": "0.1"}
        agents = [jobs.start("torchrun", *flags, f"--local_addr={NET}.{i}", *training, cold=True,
                             within=hosts.on(i), **env)
                  for i in (1, 2)]
        wait(lambda: newest(2), "two hosts train")
        hosts.cut(2)
        say("host 2 is cut off")
        wait(lambda: newest(1), "host 1 goes on alone")
        hosts.heal(2)
        say("healed")
        wait(lambda: newest(2), "two hosts train again")
        wait(lambda: all(agent.poll() is not None for agent in agents), "the end", 300)
        store.kill(15)
        store.wait(20)
        codes = [agent.poll() for agent in agents]
        counts = checks.samples_are_exact(run)
        found = checks.changes(run, set())
        checks.little_is_lost(found, 0)
        worlds, lost = [life["world"] for life in lives(run)], [change.lost for change in found]
        print(f"agents left with {codes}; {counts}; worlds {worlds}; steps lost {lost}")
        assert 0 in codes and counts["lost"] == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
