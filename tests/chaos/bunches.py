"""Machines that die in bunches, as a cloud takes them back, under launch/torchrun.py and launch/store.py.

The second of a bunch often dies while the others meet because of the first; tests/launch/test_agent.py has
the worst of these moments one by one.
"""
import signal
import time

from jobs import PACED, ROOT, audit, lives, reached, until

MOST = 4                                    # machines
PAUSES_SECONDS = (0.0, 0.5, 3.0, 9.0)       # at most; the others notice, meet, start, train
PATIENCE_SECONDS = 60


def bunches(jobs, run, rng, count, say=print):
    """Kills and adds machines in `count` bunches; the audit's counts, and the longest wait for training."""
    store, machines, seconds = jobs.start(ROOT / "launch/store.py", "127.0.0.1:0"), [], []
    until(lambda: "store on" in store.output, "the store")
    place = store.output.split("store on ")[1].strip()

    def add():
        machines.append(jobs.start(
            ROOT / "launch/torchrun.py", f"--nnodes=1:{MOST}", f"--nproc_per_node={rng.randint(1, 2)}",
            "--rdzv_backend=c10d", "--rdzv_id=job", f"--rdzv_endpoint={place}", "--rdzv_conf=is_host=0",
            "--local_addr=127.0.0.1", ROOT / "train_ddp.py", *PACED, "--epochs=99999", f"--run-dir={run}",
            PACE="0.03"))
        return "start"

    def kill():
        machines.pop(rng.randrange(len(machines))).kill()  # the kernel ends its agent and its workers
        return "kill"

    def settle():
        """Three more steps, in this life or in another one."""
        life, step, began = (lives(run) or [{}])[-1].get("life"), reached(run), time.monotonic()

        def trains():
            assert all(machine.poll() is None for machine in machines), "a machine has given up"
            return lives(run) and reached(run) > 2 + (step if lives(run)[-1]["life"] == life else 0)

        until(trains, "training to go on", PATIENCE_SECONDS)
        seconds.append(round(time.monotonic() - began, 1))
        say(f"step {reached(run)}, world {lives(run)[-1]['world']}, after {seconds[-1]} s")

    try:
        for _ in range(3):
            add()
        settle()
        for _ in range(count):
            for _ in range(rng.randint(1, 3)):
                kills = len(machines) > 1 and rng.random() < 0.7 or len(machines) == MOST
                what, pause = kill() if kills else add(), rng.uniform(0, rng.choice(PAUSES_SECONDS))
                say(f"  {what}, then {pause:.1f} s")
                time.sleep(pause)
            settle()
        for machine in machines:
            machine.kill(signal.SIGTERM)
        assert {machine.wait(60) for machine in machines} == {143}
    except AssertionError as error:
        outputs = "\n".join(machine.output[-3000:] for machine in machines)
        raise AssertionError(f"{error}\n{outputs}") from None
    store.kill(signal.SIGTERM)
    store.wait(10)
    return audit(run) | {"bunches": count, "lives": len(lives(run)), "longest_s": max(seconds[1:])}
