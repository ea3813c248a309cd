"""python -m tests.chaos.netns: three "hosts" (hosts.py) lose processes, a link and power. How long until the
next step? No sample may be missed or made twice, no step be lost. Needs root, iproute2, util-linux.
"""
import os
import signal
import tempfile
import time
from pathlib import Path

from jobs import PACED, ROOT, Jobs, audit, children, events, lives, reached, until

from tests.chaos.hosts import NET, Hosts

EVENT_SECONDS = 150  # at most, until the next step


def main(jobs, hosts, run):
    store = jobs.start(ROOT / "launch/store.py", f"{NET}.1:0", cold=True, within=hosts.on(1))
    until(lambda: "store on" in store.output, "the store")
    place = store.output.split("store on ")[1].strip()
    agents = {}

    def start(i):
        agents[i] = jobs.start(
            ROOT / "launch/torchrun.py", "--nnodes=1:3", "--nproc_per_node=1", "--max_restarts=1000",
            "--rdzv_backend=c10d", "--rdzv_id=job", f"--rdzv_endpoint={place}", "--rdzv_conf=is_host=0",
            f"--local_addr={NET}.{i}", ROOT / "train_ddp.py", *PACED, f"--run-dir={run}", "--epochs=9999",
            "--hang-timeout=15", cold=True, within=hosts.on(i), PACE="0.1")

    def kill(i, number=signal.SIGKILL, worker=False):
        pid = children(agents[i].pid)[0]  # nsenter waits for it
        while worker and children(pid):  # a fork server, and its child
            pid = max(children(pid))
        os.kill(pid, number)

    def trains(world, after):
        return any(life["world"] == world and life["t"] > after and reached(run) > life["step"] + 5
                   for life in lives(run)[-1:])

    for what, world, act in (
            ("start", 1, lambda: start(1)),
            ("late join", 2, lambda: start(2)),
            ("late join", 3, lambda: start(3)),
            ("kill -9 worker of host 1", 3, lambda: kill(1, worker=True)),
            ("SIGSTOP worker of host 2", 3, lambda: kill(2, signal.SIGSTOP, worker=True)),
            ("kill -9 agent of host 1", 2, lambda: kill(1)),
            ("started again", 3, lambda: start(1)),
            ("SIGTERM to the agent of host 3", 2, lambda: kill(3, signal.SIGTERM)),
            ("and started again", 3, lambda: start(3)),
            ("link of host 2 cut", 2, lambda: hosts.cut(2)),
            ("healed", 3, lambda: hosts.heal(2)),
            ("power of host 3 off", 2, lambda: hosts.power_off(3))):
        began = time.time()
        act()
        try:
            until(lambda world=world, began=began: trains(world, began), what, EVENT_SECONDS)
        except AssertionError:
            print(*[agent.output[-3000:] for agent in agents.values()], lives(run)[-1], sep="\n")
            raise
        first = [event["t"] for event in events(run, "first_step")][-1]
        print(f"| {what} | {first - began:.1f} s |", flush=True)
    for i in (1, 2):
        kill(i, signal.SIGTERM)
    assert [agents[i].wait(60) for i in (1, 2)] == [143, 143] and not any(audit(run).values()), audit(run)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="netns-") as folder, Hosts(3) as three, Jobs(folder) as started:
        main(started, three, Path(folder, "run"))
