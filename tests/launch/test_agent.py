"""launch/agent.py: machines that die while the others meet cost seconds, not the job."""
import os
import socket
import threading
import time

import pytest
from jobs import PACED, ROOT, audit, lives
from stores import child
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

CLEAN = {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
DIES = """
import os, signal
if os.environ["WORLD_SIZE"] == "3":
    os.kill(os.getppid(), signal.SIGKILL)    # the launcher; the kernel ends its agent and this worker
signal.pause()
"""


@pytest.fixture
def place(jobs):
    """Of the machines' store, where they meet."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    store = jobs.start(ROOT / "launch/store.py", place)
    yield place
    store.kill()
    store.wait()


def machine(jobs, place, script, *flags):
    return jobs.start(ROOT / "launch/torchrun.py", "--nnodes=1:3", "--nproc_per_node=1",
                      "--rdzv_backend=c10d", "--rdzv_id=job", f"--rdzv_endpoint={place}",
                      "--rdzv_conf=is_host=0", "--local_addr=127.0.0.1", script, *flags, PACE="0.02")


def dies_as_all_have_come(place, address):
    """Its address orders it among the machines."""
    conf = {"is_host": "0", "last_call_timeout": "1",
            "keep_alive_interval": "2", "keep_alive_max_attempt": "3"}
    one, eye = (registry.get_rendezvous_handler(RendezvousParameters(
        "c10d", place, "job", 1, 3, local_addr=address, **conf)) for _ in range(2))

    def wait_for(count):
        while len(eye._state_holder.state.participants) < count:
            eye._state_holder.sync()
            time.sleep(0.01)

    wait_for(2)
    threading.Thread(target=one.next_rendezvous, daemon=True).start()
    wait_for(3)
    os._exit(0)


def assert_complete(nodes, run):
    assert [node.wait(100) for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert lives(run)[-1]["world"] == 2 and audit(run) == CLEAN
    assert "Traceback" not in nodes[0].output + nodes[1].output


@pytest.mark.parametrize("address", ["0.0.0.0", "9.9.9.9"], ids=["first", "last"])
def test_a_machine_that_dies_as_all_have_come_does_not_end_the_others(jobs, place, tmp_path, address):
    with child(lambda: dies_as_all_have_come(place, address)):
        nodes = [machine(jobs, place, ROOT / "train_ddp.py", *PACED, "--run-dir", tmp_path / "run")
                 for _ in range(2)]
        assert_complete(nodes, tmp_path / "run")


def test_a_machine_that_dies_before_its_ranks_have_come_keeps_no_rank_waiting(jobs, place, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    dying = machine(jobs, place, script)
    nodes = [machine(jobs, place, ROOT / "train_ddp.py", *PACED, "--run-dir", tmp_path / "run")
             for _ in range(2)]
    dying.wait()
    assert_complete(nodes, tmp_path / "run")
