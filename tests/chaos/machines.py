"""Machines that fall silent: each has a network, a host name and process numbers of its own, on one bridge.

A store and some machines, under launch/torchrun.py, train one run, and a fault strikes. Within its bound the
training must go on, or end as asked; then no sample may be missed, and no step of a survivor lost.
"""

import ctypes
import importlib
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [f"{ROOT}/tests/tools"]

from jobs import PACED, audit, family, lives, reached, until  # noqa: E402

NEW_MOUNTS = 0x00020000
NEW_NAME = 0x04000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000
PR_SET_PDEATHSIG = 1
STORE = 8  # numbers of machines, and last bytes of their addresses
NOBODY = 9  # answers nothing, where a name server should
HUB = "ip link add name br0 type bridge ageing_time 0 && ip link set br0 up && echo && exec cat"
# With known neighbours a cut cable is silent; else the kernel finds out in 3 seconds that nobody is there.
NEIGHBOURS = "".join(
    f"neigh replace 10.213.0.{other} lladdr 02:00:00:00:00:0{other} dev eth0\n" for other in range(NOBODY + 1)
)
SHORT = {  # {module: its limits in seconds} of the tests
    "common.world.rendezvous": {"SILENT_SECONDS": 4},
    "common.checkpoint.fence": {"NODE_BEAT_SECONDS": 0.5, "NODE_STILL_SECONDS": 3},
}


def why_not():
    """Why no machine can be made here; empty if one can."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare"))):
        return "machines need root, iproute2 and util-linux"
    hub = ["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "sh", "-c", HUB]
    return subprocess.run(hub, input="", text=True, capture_output=True).stderr


def become(number, port, hub, *words):
    """This process enters a new machine, and its child is process 1 there and runs a script."""
    kernel = ctypes.CDLL(None)
    kernel.unshare(NEW_NETWORK | NEW_NAME | NEW_MOUNTS)
    socket.sethostname(f"machine{number}")
    nameless = "NAMELESS" in os.environ
    names = [f"10.213.0.{other} machine{other}\n" for other in range(NOBODY) if not nameless]
    Path(f"{port}-hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
    Path(f"{port}-resolv").write_text(f"nameserver {f'10.213.0.{NOBODY}' if nameless else '127.0.0.1'}\n")
    me = f"02:00:00:00:00:0{number} up\naddr add 10.213.0.{number}/24 dev eth0\n{NEIGHBOURS}"
    for command, lines in (
        (f"nsenter -t {hub} -n ip link add name {port} type veth peer name eth0 netns {os.getpid()}", ""),
        (f"nsenter -t {hub} -n ip link set {port} master br0 up", ""),
        ("ip -batch -", f"link set lo up\nlink set eth0 address {me}"),
        ("mount --make-rprivate /", ""),
        (f"mount --bind {port}-hosts /etc/hosts", ""),
        (f"mount --bind {port}-resolv /etc/resolv.conf", ""),
    ):
        subprocess.run(command.split(), input=lines, text=True, check=True)
    kernel.unshare(NEW_PIDS)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    kernel.mount(b"proc", b"/proc", b"proc", 0, None)
    sys.path[:1] = [str(Path(words[0]).parents[1])]
    for module, limits in SHORT.items() if "SHORT" in os.environ else ():
        vars(importlib.import_module(module)).update(limits)
    sys.argv = [*words]
    runpy.run_path(words[0], run_name="__main__")


class Box:
    """A bridge, a store, and machines that train one run; they are numbered from 1, which has rank 0."""

    def __init__(self, jobs, run, short, **env):
        self.jobs = jobs
        self.run = run
        self.hang = 60 if short else 600  # seconds
        self.env = {"PACE": "0.05", **env} | ({"SHORT": "1"} if short else {})
        self.machines = {}
        self.ports = {}
        self.struck = 0  # the step at which the fault struck
        hub = ["unshare", "--net", "sh", "-c", HUB]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.hub = subprocess.Popen(hub, env=jobs.environment(), **pipes)
        self.hub.stdout.readline()

    def close(self):
        for machine in self.machines.values():
            machine.kill()
        self.hub.communicate()

    # ---- what is there ----
    def start(self, number, *words, **env):
        self.ports[number] = f"port{self.jobs.count}"
        place = (number, self.ports[number], self.hub.pid)
        self.machines[number] = self.jobs.start(
            __file__, *place, *words, cwd=self.run.parent, **self.env | env
        )

    def open_store(self):
        self.start(STORE, ROOT / "launch/store.py", f"10.213.0.{STORE}:29400")
        until(lambda: "store on" in self.machines[STORE].output, "the store")

    def add(self, *flags, root=ROOT, **env):
        self.start(
            len(self.machines),
            root / "launch/torchrun.py",
            "--nnodes=1:8",
            "--nproc_per_node=1",
            "--rdzv_backend=c10d",
            "--rdzv_id=job",
            f"--rdzv_endpoint=10.213.0.{STORE}:29400",
            "--rdzv_conf=is_host=0",
            root / "train_ddp.py",
            *PACED,
            "--epochs=9999",
            f"--hang-timeout={self.hang}",
            f"--run-dir={self.run}",
            *flags,
            **env,
        )

    def add_an_older_one(self):
        """Its code is another; not its flags."""
        root = self.run.parent / "older"
        for name in ("common", "launch"):
            shutil.copytree(ROOT / name, root / name)
        shutil.copy(ROOT / "train_ddp.py", root)
        (root / "common/sampler.py").open("a").write("OLDER = True\n")
        self.add(root=root)

    @property
    def training(self):
        return {number: machine for number, machine in self.machines.items() if number != STORE}

    # ---- what happens to machines ----
    def signal(self, number, *machines):
        for pid in [pid for machine in machines for pid in family(self.machines[machine].pid)[1:]]:
            self.jobs.kill(pid, number)

    def stop(self, *machines):
        self.signal(signal.SIGSTOP, *machines)

    def resume(self, *machines):
        self.signal(signal.SIGCONT, *machines)

    def pause(self, seconds, *machines):
        self.stop(*machines)
        time.sleep(seconds)
        self.resume(*machines)

    def kill(self, machine):
        self.signal(signal.SIGKILL, machine)
        self.machines.pop(machine).wait()

    def kill_a_rank(self, machine):
        self.jobs.kill(family(self.machines[machine].pid)[-1])

    def forget_the_newest(self):
        self.machines.popitem()

    def ask(self):
        """Each is told to end, as a kubelet tells process 1."""
        for machine in self.training.values():
            self.jobs.kill(family(machine.pid)[1], signal.SIGTERM)

    def cable(self, machine, command):
        line = command.format(self.ports[machine])
        subprocess.run(["nsenter", "-t", str(self.hub.pid), "-n", "sh", "-c", line], check=True)

    def cut(self, machine):
        """The carrier stays up, and packets vanish."""
        self.cable(machine, "ip link set {} nomaster")

    def plug(self, machine):
        self.cable(machine, "ip link set {} master br0")

    def worsen(self, machine):
        """Slow and lossy; not every kernel has netem, and a bucket that holds two packets loses the third."""
        lossy = "tc qdisc add dev {0} root netem delay 20ms loss 5% 2> /dev/null"
        self.cable(machine, f"{lossy} || tc qdisc add dev {{0}} root tbf rate 200kbit burst 2kb limit 3kb")

    def ask_for_a_save(self):
        (self.run / "control/save").touch()

    def ask_in_the_save(self):
        until(lambda: [*self.run.glob("checkpoints/.life*/*/*.safetensors")], "a save")
        self.ask()

    # ---- what must come true ----
    def trains(self, machines):
        """Three more steps than before the fault, in a world of so many."""
        return lives(self.run)[-1]["world"] == machines and reached(self.run) >= self.struck + 3

    def all_train(self):
        return self.trains(len(self.training))

    def one_less_trains(self):
        return self.trains(len(self.training) - 1)

    def newest_is_refused(self):
        """By a mistake of its own."""
        return [*self.machines.values()][-1].poll() == 2

    def all_have_left(self):
        return all(machine.poll() is not None for machine in self.training.values())


class Fault(NamedTuple):
    strike: Callable[[Box], Any]
    then: Callable[[Box], bool]
    seconds: int  # within which it must come true
    short: int  # with the limits of the tests
    heal: Callable[[Box], Any] = lambda box: None  # then all train again
    env: dict[str, str] = {}


LARGE = {"STATE_MB": "500"}
FAULTS = {
    "agent killed": Fault(lambda box: box.kill(2), Box.all_train, 20, 20),
    "cable cut": Fault(lambda box: box.cut(2), Box.one_less_trains, 60, 20, lambda box: box.plug(2)),
    "cable cut of rank 0": Fault(
        lambda box: box.cut(1), Box.one_less_trains, 60, 20, lambda box: box.plug(1)
    ),
    "cable slow and lossy": Fault(lambda box: box.worsen(2), Box.all_train, 60, 30),
    "stopped for a second": Fault(lambda box: box.pause(1, 2), Box.all_train, 10, 10),
    "stopped": Fault(lambda box: box.stop(2), Box.one_less_trains, 640, 30, lambda box: box.resume(2)),
    "stopped and cut": Fault(
        lambda box: (box.stop(1), box.cut(1)),
        Box.one_less_trains,
        60,
        20,
        lambda box: (box.plug(1), box.resume(1)),
    ),
    "power": Fault(
        lambda box: (box.stop(2), box.cut(2)), Box.one_less_trains, 60, 20, lambda box: box.kill(2)
    ),
    "all stopped": Fault(lambda box: box.pause(2.2 * box.hang, *box.machines), Box.all_train, 20, 20),
    "store stopped": Fault(lambda box: box.pause(20, STORE), Box.all_train, 20, 20),
    "store stopped, then SIGTERM": Fault(lambda box: (box.stop(STORE), box.ask()), Box.all_have_left, 20, 20),
    "store killed": Fault(lambda box: (box.kill(STORE), box.open_store()), Box.all_train, 20, 20),
    "store killed, then SIGTERM in the save": Fault(
        lambda box: (box.kill(STORE), box.ask_in_the_save()), Box.all_have_left, 60, 60, env=LARGE
    ),
    "SIGTERM in a save": Fault(
        lambda box: (box.ask_for_a_save(), box.ask_in_the_save()), Box.all_have_left, 60, 60, env=LARGE
    ),
    "rank killed, no name server": Fault(
        lambda box: box.kill_a_rank(2), Box.all_train, 10, 10, env={"NAMELESS": "1"}
    ),
    "wrong flags": Fault(
        lambda box: box.add("--seed=7"), Box.newest_is_refused, 30, 30, Box.forget_the_newest
    ),
    "no data": Fault(lambda box: box.add(NO_DATA="1"), Box.newest_is_refused, 30, 30, Box.forget_the_newest),
    "no device": Fault(
        lambda box: box.add("--device=cuda"), Box.newest_is_refused, 30, 30, Box.forget_the_newest
    ),
    "older code": Fault(Box.add_an_older_one, Box.newest_is_refused, 30, 30, Box.forget_the_newest),
}


def strike(jobs, folder, name, count, short=False):
    """(seconds until all was well, what was lost) of one fault; AssertionError if it was not, or too late."""
    fault = FAULTS[name]
    bound = fault.short if short else fault.seconds
    folder.mkdir()
    box = Box(jobs, folder / "run", short, **fault.env)
    try:
        box.open_store()
        for _ in range(count):
            box.add()
        until(lambda: lives(box.run) and box.trains(count), "all machines to train")
        box.struck = reached(box.run)
        fault.strike(box)
        began = time.monotonic()
        until(lambda: fault.then(box), f"what must come true after: {name}", bound)
        seconds = time.monotonic() - began
        fault.heal(box)
        if fault.then is not Box.all_have_left:
            box.struck = reached(box.run)
            until(box.all_train, f"all to train after: {name}", bound)
            box.ask()
            until(box.all_have_left, f"the end after: {name}", 60)
        codes = {machine.poll() for machine in box.training.values()}
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
    assert lost <= int(fault.then is Box.one_less_trains), f"{lost} steps are lost"
    return seconds, lost


def campaign(jobs, folder, count, only):
    """A table: fault, bound, seconds, steps lost; the number of faults that were not survived."""
    failed = 0
    print(f"{'fault':40} {'bound':>6} {'seconds':>8}  lost")
    for number, name in enumerate(only or FAULTS):
        row = f"{name:40} {FAULTS[name].seconds:6}"
        try:
            seconds, lost = strike(jobs, folder / f"fault-{number}", name, count)
            print(f"{row} {seconds:8.1f}  {lost}", flush=True)
        except AssertionError as error:
            failed += 1
            fact, _, said = str(error).partition("\n")
            print(f"{row}        -  {fact}", flush=True)
            print(said, file=sys.stderr)
    return failed


if __name__ == "__main__":
    become(*sys.argv[1:])
