"""python -m tests.chaos.netns [plain] [ours]: three "hosts" (hosts.py) lose processes, links, power and each
other. How long until the next step, with launch/torchrun.py and with plain torchrun? Needs root, iproute2,
util-linux. With ours, no sample may be missed or made twice, no step be lost and no job end.

Prints a line at once for each event, and the whole table at the end.
"""
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from jobs import PACED, ROOT, Jobs, children, events, lives, reached, until

from common.ledger import audit, summarize
from tests.chaos.hosts import NET, Hosts

HANG_SECONDS = 15                                                   # --hang-timeout
EVENT_SECONDS = 150                                                 # at most, until the next step
SLOW = 0.05, 0.02               # seconds that a frame comes late, and the part of them that never comes


class Job:
    """One training on up to three hosts, and what is done to it; `own`: each host has its own run folder."""

    def __init__(self, jobs, hosts, run, plain, own=False, fixed=False):
        self.jobs, self.hosts, self.plain, self.fixed, self.rows = jobs, hosts, plain, fixed, {}
        self.runs = {i: Path(f"{run}{i}" if own else run) for i in (1, 2, 3)}
        self.folders, self.agents, self.number = sorted(set(self.runs.values())), {}, 0
        self.meet()

    def meet(self):
        """A new name for the job and, for ours, a new store; as after the end of the job before."""
        self.number, self.endpoint = self.number + 1, f"{NET}.1:29400"
        if not self.plain and not self.fixed:
            store = self.jobs.start(ROOT / "launch" / "store.py", f"{NET}.1:0", cold=True,
                                    within=self.hosts.on(1))
            until(lambda: "store on" in store.output, "the store")
            self.endpoint = store.output.split("store on ")[1].strip()

    def start(self, *numbers):
        launcher = "torchrun" if self.plain else ROOT / "launch" / "torchrun.py"
        for i in numbers:
            if self.fixed:
                place = ["--nnodes=2", f"--node_rank={i - 1}", f"--master_addr={NET}.1",
                         "--master_port=29555"]
            else:
                name = f"{self.runs[1].name}-{self.number}"
                place = ["--nnodes=1:3", "--rdzv_backend=c10d", f"--rdzv_id={name}",
                         f"--rdzv_endpoint={self.endpoint}"] + ["--rdzv_conf=is_host=0"] * (not self.plain)
            self.agents[i] = self.jobs.start(
                launcher, "--nproc_per_node=1", "--max_restarts=1000", f"--local_addr={NET}.{i}", *place,
                ROOT / "train_ddp.py", *PACED, f"--run-dir={self.runs[i]}", "--epochs=9999",
                *[] if self.plain else [f"--hang-timeout={HANG_SECONDS}"], cold=True, within=self.hosts.on(i),
                PACE="0.1")

    def launcher(self, i):
        return children(self.agents[i].pid)[0]  # nsenter waits for it

    def kill(self, i, number=signal.SIGKILL):
        os.kill(self.launcher(i), number)

    def worker(self, i, number):
        """Signals the rank on that host; its number among the host's processes is not ours."""
        os.kill(max(children(self.launcher(i))), number)

    def trains(self, world, after):
        """The moment of the first step of a life of so many ranks that began after that moment."""
        return next((step["t"] for run in self.folders for life in lives(run)
                     if life["world"] == world and life["t"] > after
                     for step in events(run, "first_step") if step["t"] > life["t"]), None)

    def step(self):
        return max(map(reached, self.folders))

    def more_steps(self):
        step = self.step()
        until(lambda: self.step() > step + 5, "some steps more")

    def event(self, what, world, act):
        """What comes of it: the seconds until the next step, if there is one."""
        began = time.time()
        act()
        try:
            then = until(lambda: self.trains(world, began) or self.all_ended() and -1, what, EVENT_SECONDS)
        except AssertionError as error:
            then, outputs = None, [job.output[-3000:] for job in self.agents.values()]
            print(error, *outputs, sep="\n", file=sys.stderr)
        if then and then > 0:
            self.note(what, f"{then - began:.1f} s", self.gap())
            self.more_steps()
            return
        self.note(what, f"all agents have ended after {time.time() - began:.0f} s" if then else
                  f"no step in {EVENT_SECONDS} s")
        if not self.plain:
            raise SystemExit(1)
        self.anew(*self.agents)

    def note(self, what, text, gap=()):
        self.rows[what] = text
        print(f"| {what} | {text} | {', '.join(gap)} |", flush=True)

    def gap(self):
        """Where the time went, by the ledger."""
        newest = max(filter(lives, self.folders), key=lambda run: lives(run)[-1]["t"])
        before, after = (life["buckets"] for life in summarize(newest)["lives"][-2:])
        gap = {"rescue": before.get("rescue", 0), "down": after["down"], "start": after["start"]}
        return [f"{part} {seconds:.1f}" for part, seconds in gap.items() if seconds >= 0.1]

    def anew(self, *numbers):
        """What a person does who finds the job ended, or stuck: all hosts again, as a new job."""
        for i, agent in self.agents.items():
            with contextlib.suppress(IndexError, ProcessLookupError):  # it has ended
                self.kill(i)
            agent.wait(60)
        began = time.time()
        self.meet()
        self.start(*numbers)
        until(lambda: self.trains(len(numbers), began), "the job started again", EVENT_SECONDS)
        self.more_steps()

    def pace(self, seconds=20):
        """Steps a second, and the longest time without one."""
        first, last, longest, end = self.step(), time.monotonic(), 0, time.monotonic() + seconds
        step = first
        while (now := time.monotonic()) < end:
            if (newest := self.step()) > step:
                step, last = newest, now
            longest = max(longest, now - last)
            time.sleep(0.01)
        return f"{(step - first) / seconds:.1f} steps/s, longest gap {longest:.1f} s"

    def all_ended(self):
        return all(agent.poll() is not None for agent in self.agents.values())

    def end(self):
        began = time.time()
        for i, agent in self.agents.items():
            if agent.poll() is None:
                self.kill(i, signal.SIGTERM)
        codes = [agent.wait(60) for agent in self.agents.values()]
        seconds, counts = time.time() - began, audit(*self.folders)
        name = self.runs[1].name
        self.note(f"{name}: SIGTERM to all", f"{seconds:.1f} s, codes {', '.join(map(str, codes))}")
        self.note(f"{name}: audit", " ".join(f"{what} {count}" for what, count in counts.items()))
        assert self.plain or not any(counts.values())


def elastic(job, hosts):
    """The store that ours starts on host 1 lives as long as that host."""
    job.event("start, two of 1:3", 2, lambda: job.start(1, 2))
    job.event("late join", 3, lambda: job.start(3))
    for i in (2, 1):
        job.event(f"kill -9 worker of host {i}", 3, lambda i=i: job.worker(i, signal.SIGKILL))
    job.event("kill -9 agent of host 3", 2, lambda: job.kill(3))
    job.event("started again", 3, lambda: job.start(3))
    job.event("SIGTERM to the agent of host 3", 2, lambda: job.kill(3, signal.SIGTERM))
    job.event("and started again", 3, lambda: job.start(3))
    job.event("kill -9 agent of host 1", 2, lambda: job.kill(1))
    if job.trains(3, 0) and job.agents[1].poll() is not None:
        job.event("host 1 started again", 3, lambda: job.start(1))
    job.event("SIGSTOP worker of host 2", 3, lambda: job.worker(2, signal.SIGSTOP))
    job.event("link of host 2 cut", 2, lambda: hosts.cut(2))
    job.event("healed", 3, lambda: hosts.heal(2))
    job.note("three hosts", job.pace())
    hosts.slow(2, *SLOW)
    before = job.step()
    until(lambda: job.step() > before + 3 or job.all_ended(), "steps over a slow link")
    job.note("slow link of host 2: 50 ms and 2 % loss each way", job.pace())
    for i in (2, 1):
        job.event(f"in it, kill -9 worker of host {i}", 3, lambda i=i: job.worker(i, signal.SIGKILL))
    hosts.heal(2)
    job.end()


def own_folders(job, hosts):
    job.event("own folders: start of three", 3, lambda: job.start(1, 2, 3))
    job.event("own folders: kill -9 worker of host 1", 3, lambda: job.worker(1, signal.SIGKILL))

    def power_cut():
        for i in (1, 2):
            hosts.power_off(i)
        until(lambda: job.agents[1].poll() is not None and job.agents[2].poll() is not None, "the power cut")
        job.anew(1, 2, 3)
    job.event("own folders: power of hosts 1 and 2 off, all started again", 3, power_cut)
    job.end()


def fixed(job, hosts):
    job.event("fixed numbers: start", 2, lambda: job.start(1, 2))
    job.event("fixed numbers: kill -9 worker of host 2", 2, lambda: job.worker(2, signal.SIGKILL))
    job.end()


def main(arguments):
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        print("skipped: needs root, iproute2 and util-linux")
        return 0
    if not {*arguments} <= {"plain", "ours"}:
        print(__doc__, file=sys.stderr)
        return 2
    tables = {}
    for kind in arguments or ["plain", "ours"]:
        tables[kind] = {}
        print(f"| {kind} | next step | where the time went |\n|---|---|---|", flush=True)
        with tempfile.TemporaryDirectory(prefix="netns-") as folder, Hosts(3) as hosts, Jobs(folder) as jobs:
            for act in (elastic, own_folders, fixed):
                job = Job(jobs, hosts, f"{folder}/{act.__name__}", kind == "plain", act is own_folders,
                          act is fixed)
                act(job, hosts)
                tables[kind] |= job.rows
    print(f"\n| event | {' | '.join(tables)} |\n|---|{'---|' * len(tables)}")
    for what in dict.fromkeys(what for rows in tables.values() for what in rows):
        print(f"| {what} | {' | '.join(rows.get(what, '') for rows in tables.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
