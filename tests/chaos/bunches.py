"""Machines that die in bunches, as a cloud takes them back, under launch/torchrun.py and launch/store.py.

The second of a bunch often dies while the others meet because of the first; tests/launch/test_agent.py has
the worst of these moments one by one.
"""

import signal
import time

from jobs import PACED, ROOT, audit, lives, reached, until

MOST = 4  # machines
PAUSES_SECONDS = (0.0, 0.5, 3.0, 9.0)  # at most; the others notice, meet, start, train
PATIENCE_SECONDS = 200  # torch itself would wait for 300


def bunches(jobs, run, rng, count, say=print):
    """Kills and adds machines in `count` bunches; the audit's counts, and the longest wait for training."""
    store, place = jobs.store()
    machines = []
    waits = []

    def add():
        machines.append(
            jobs.start(
                ROOT / "launch/torchrun.py",
                f"--nnodes=1:{MOST}",
                f"--nproc_per_node={rng.randint(1, 2)}",
                "--rdzv_backend=c10d",
                "--rdzv_id=job",
                f"--rdzv_endpoint={place}",
                "--rdzv_conf=is_host=0",
                "--local_addr=127.0.0.1",
                ROOT / "train_ddp.py",
                *PACED,
                "--epochs=99999",
                f"--run-dir={run}",
                PACE="0.03",
            )
        )

    def settle():
        """Three more steps, in this life or in another one."""
        began = time.monotonic()
        life = len(lives(run))
        step = reached(run) if life else 0

        def trains():
            assert all(machine.poll() is None for machine in machines), [each.output for each in machines]
            now = len(lives(run))
            return now and reached(run) > 2 + (step if now == life else lives(run)[-1]["step"])

        until(trains, "training to go on", PATIENCE_SECONDS)
        waits.append(round(time.monotonic() - began, 1))
        say(f"step {reached(run)}, world {lives(run)[-1]['world']}, after {waits[-1]} s")

    for _ in range(3):
        add()
    settle()
    for _ in range(count):
        for _ in range(rng.randint(1, 3)):
            if len(machines) == MOST or len(machines) > 1 and rng.random() < 0.7:
                machines.pop(rng.randrange(len(machines))).kill()  # with its agent and its workers
            else:
                add()
            time.sleep(rng.uniform(0, rng.choice(PAUSES_SECONDS)))
        settle()
    for machine in machines:
        machine.kill(signal.SIGTERM)
    assert {machine.wait() for machine in machines} == {143}
    store.kill(signal.SIGTERM)
    store.wait()
    return audit(run) | {"bunches": count, "lives": len(lives(run)), "longest_s": max(waits[1:])}
