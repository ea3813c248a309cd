"""Machines that fall silent: each has a network, a host name and process numbers of its own, on one bridge.

A store and some machines, under launch/torchrun.py, train one run, and a fault strikes. Within its bound the
training must go on, or end as asked; then no sample may be missed, and no step of a survivor lost.
"""

import ctypes
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [f"{ROOT}/tests/tools"]

from jobs import PACED, audit, family, lives, reached, until  # noqa: E402


class Fault(NamedTuple):
    acts: str  # of a Box, each with its words: what happens
    then: str  # what must come true
    seconds: int  # within which
    heal: str = ""  # afterwards; then all train again
    env: dict = {}


LARGE = {"STATE_MB": "500"}  # there is time to strike in a save
FAULTS = {
    "agent killed": Fault("kill 2", "all_train", 30),
    "cable cut": Fault("cut 2", "one_less_trains", 60, "plug 2"),
    "cable cut of rank 0": Fault("cut 1", "one_less_trains", 60, "plug 1"),
    "cable slow and lossy": Fault("worsen 2", "all_train", 60),
    "stopped for a second": Fault("stop 2, wait 1, resume 2", "all_train", 10),
    "stopped": Fault("stop 2", "one_less_trains", 640, "resume 2"),
    "stopped and cut": Fault("stop 1, cut 1", "one_less_trains", 60, "plug 1, resume 1"),
    "power": Fault("stop 2, cut 2", "one_less_trains", 60, "kill 2"),
    "all stopped": Fault("stop all, wait 1320, resume all", "all_train", 20),
    "store stopped": Fault("stop store, wait 20, resume store", "all_train", 20),
    "store stopped, then SIGTERM": Fault("stop store, ask", "all_have_left", 20),
    "store killed": Fault("kill store, open_store", "all_train", 45),
    "store killed, then SIGTERM in the save": Fault(
        "kill store, ask_in_the_save", "all_have_left", 60, "", LARGE
    ),
    "SIGTERM in a save": Fault("ask_for_a_save, ask_in_the_save", "all_have_left", 60, "", LARGE),
    "wrong flags": Fault("add new --seed=7", "new_is_refused", 30, "forget new"),
    "no device": Fault("add new --device=cuda", "new_is_refused", 30, "forget new"),
}
NUMBERS = {"store": 8, "new": 7}  # last bytes of addresses; others have their name
HUB = "ip link add name br0 type bridge ageing_time 0 && ip link set br0 up && echo && exec cat"
SPACES = ["unshare", "--net", "--uts", "--pid", "--mount", "--fork"]
# As `unshare` makes them, and `prctl` wants it.
NEW_NETWORK_NAME_AND_MOUNTS = 0x40000000 | 0x04000000 | 0x00020000
NEW_PIDS = 0x20000000
PR_SET_PDEATHSIG = 1
# With known neighbours a cut cable is silent; else the kernel finds out in 3 seconds that nobody is there.
SET_UP = """link set lo up
link set eth0 address 02:00:00:00:00:0{0} up
addr add 10.213.0.{0}/24 dev eth0
""" + "".join(f"neigh replace 10.213.0.{n} lladdr 02:00:00:00:00:0{n} dev eth0\n" for n in range(10))


def why_not():
    """Why no machine can be made here; empty if one can."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare"))):
        return "machines need root, iproute2 and util-linux"
    return subprocess.run([*SPACES, "sh", "-c", HUB], input="", text=True, capture_output=True).stderr


def become(number, port, hub, *words):
    """This process enters a new machine, and its child is process 1 there and runs a script."""
    kernel = ctypes.CDLL(None)
    kernel.unshare(NEW_NETWORK_NAME_AND_MOUNTS)
    socket.sethostname(f"machine{number}")
    names = "".join(f"10.213.0.{n} machine{n}\n" for n in range(9))
    Path(f"{port}-hosts").write_text(f"127.0.0.1 localhost\n{names}")
    for command in (
        f"nsenter -t {hub} -n ip link add name {port} type veth peer name eth0 netns {os.getpid()}",
        f"nsenter -t {hub} -n ip link set {port} master br0 up",
        "ip -batch -",
        "mount --make-rprivate /",
        f"mount --bind {port}-hosts /etc/hosts",
    ):
        subprocess.run(command.split(), input=SET_UP.format(number), text=True, check=True)
    kernel.unshare(NEW_PIDS)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code % 256)
    kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    kernel.mount(b"proc", b"/proc", b"proc", 0, None)
    sys.path[:1] = [str(Path(words[0]).parents[1])]
    sys.argv = [*words]
    runpy.run_path(words[0], run_name="__main__")


class Box:
    """A bridge, a store, and machines that train one run: 1, which has rank 0, 2, ..., maybe a new one."""

    def __init__(self, jobs, run, env):
        self.jobs = jobs
        self.run = run
        self.env = env
        self.machines = {}
        self.ports = {}
        self.struck = 0  # the step at which the fault struck
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.hub = subprocess.Popen([*SPACES[:2], "sh", "-c", HUB], env=jobs.environment(), **pipes)
        self.hub.stdout.readline()

    def close(self):
        for machine in self.machines.values():
            machine.kill()
        self.hub.communicate()

    def act(self, text):
        for act in filter(None, text.split(", ")):
            name, *words = act.split()
            getattr(self, name)(*words)

    # ---- what is there ----
    def start(self, name, *words):
        self.ports[name] = f"port{self.jobs.count}"
        place = (NUMBERS.get(name, name), self.ports[name], self.hub.pid)
        self.machines[name] = self.jobs.start(__file__, *place, *words, cwd=self.run.parent, **self.env)

    def open_store(self):
        self.start("store", ROOT / "launch/store.py", "10.213.0.8:29400")
        until(lambda: "store on" in self.machines["store"].output, "the store")

    def add(self, name, *flags):
        agent = "--nnodes=1:8 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_id=job --rdzv_conf=is_host=0"
        agent = [ROOT / "launch/torchrun.py", *agent.split(), "--rdzv_endpoint=10.213.0.8:29400"]
        words = [*agent, ROOT / "train_ddp.py", *PACED, "--epochs=9999", "--hang-timeout=600"]
        self.start(name, *words, "--run-dir", self.run, *flags)

    def forget(self, name):
        del self.machines[name]

    @property
    def training(self):
        return [machine for name, machine in self.machines.items() if name != "store"]

    # ---- what happens to machines ----
    def signal(self, name, number):
        names = self.machines if name == "all" else [name]
        for pid in [pid for name in names for pid in family(self.machines[name].pid)[1:]]:
            self.jobs.kill(pid, number)

    def stop(self, name):
        self.signal(name, signal.SIGSTOP)

    def resume(self, name):
        self.signal(name, signal.SIGCONT)

    def kill(self, name):
        self.signal(name, signal.SIGKILL)
        self.machines.pop(name).wait()

    def wait(self, seconds):
        time.sleep(int(seconds))

    def ask(self):
        """Each is told to end, as a kubelet tells process 1."""
        for machine in self.training:
            self.jobs.kill(family(machine.pid)[1], signal.SIGTERM)

    def ask_for_a_save(self):
        (self.run / "control/save").touch()

    def ask_in_the_save(self):
        until(lambda: [*self.run.glob("checkpoints/.life*/*/*.safetensors")], "a save")
        self.ask()

    def cable(self, name, command):
        line = command.format(self.ports[name])
        subprocess.run(["nsenter", "-t", str(self.hub.pid), "-n", "sh", "-c", line], check=True)

    def cut(self, name):
        """The carrier stays up, and packets vanish."""
        self.cable(name, "ip link set {} nomaster")

    def plug(self, name):
        self.cable(name, "ip link set {} master br0")

    def worsen(self, name):
        """Not every kernel has netem; a bucket that holds two packets is slow, and loses the third."""
        lossy = "tc qdisc add dev {0} root netem delay 20ms loss 5% 2> /dev/null"
        self.cable(name, f"{lossy} || tc qdisc add dev {{0}} root tbf rate 200kbit burst 2kb limit 3kb")

    # ---- what must come true ----
    def trains(self, machines):
        """Three more steps than before the fault, in a world of so many."""
        return lives(self.run)[-1]["world"] == machines and reached(self.run) >= self.struck + 3

    def all_train(self):
        return self.trains(len(self.training))

    def one_less_trains(self):
        """And a log names the machine that is gone."""
        named = any("torchrun: without" in machine.output for machine in self.training)
        return named and self.trains(len(self.training) - 1)

    def new_is_refused(self):
        """By a mistake of its own."""
        return self.machines["new"].poll() == 2

    def all_have_left(self):
        return all(machine.poll() is not None for machine in self.training)


def strike(jobs, folder, name, count):
    """(seconds until all was well, steps lost) of one fault; AssertionError if it was not, or too late."""
    fault = FAULTS[name]
    folder.mkdir()
    box = Box(jobs, folder / "run", {"PACE": "0.05"} | fault.env)
    try:
        box.open_store()
        for machine in range(1, count + 1):
            box.add(str(machine))
        until(lambda: lives(box.run) and box.trains(count), "all machines to train")
        box.struck = reached(box.run)
        box.act(fault.acts)
        began = time.monotonic()
        until(getattr(box, fault.then), f"{fault.then} after {fault.acts}", fault.seconds)
        seconds = time.monotonic() - began
        box.act(fault.heal)
        if fault.then != "all_have_left":
            box.struck = reached(box.run)
            until(box.all_train, f"all_train after {fault.heal}", fault.seconds)
            box.ask()
            until(box.all_have_left, "the end", 60)
        codes = {machine.poll() for machine in box.training}
        assert codes == {143}, f"exit codes {codes}"
    except AssertionError as error:
        said = "\n".join(machine.output[-3000:] for machine in box.machines.values())
        raise AssertionError(f"{error}\n{said}") from None
    finally:
        box.close()
    until(lambda: not jobs.alive(), "the last process to end", 20)
    counts = audit(box.run)
    assert counts["missed"] == counts["repeated"] == 0, counts
    saved = [int(path.parent.name[5:13]) for path in box.run.glob("checkpoints/step-*/manifest.json")]
    lost = counts["lost"] + reached(box.run) - max(saved, default=0)
    # a machine that is gone may have been a step ahead
    assert lost <= (fault.then == "one_less_trains" or fault.acts == "kill 2"), f"{lost} steps are lost"
    return seconds, lost


def campaign(jobs, folder, count, only):
    """A table: fault, bound, seconds, steps lost; the number of faults that were not survived."""
    failed = 0
    for name in only or FAULTS:
        print(f"{name:40} {FAULTS[name].seconds:6}", end="", flush=True)
        try:
            seconds, lost = strike(jobs, folder / name, name, count)
            print(f"{seconds:8.1f}  {lost}")
        except AssertionError as error:
            failed += 1
            print(f"  {error}")
    return failed


if __name__ == "__main__":
    become(*sys.argv[1:])
