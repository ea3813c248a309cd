"""launch/agent.py: machines that die while the others meet cost seconds, not the job."""

import base64
import contextlib
import os
import pickle
import signal
import time
from datetime import datetime, timezone

import pytest
from jobs import CLEAN, PACED, ROOT, audit, family, free_port, lives, until
from poisoned import Bomb
from ranks import fork_ranks
from refusals import refusal
from stores import child
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous, registry

from launch.agent import Agent, replace_names

DIES = """
import os, signal
if os.environ["WORLD_SIZE"] == "3":
    os.kill(int(os.environ.get("LAUNCHER_PID", os.getppid())), signal.SIGKILL)
signal.pause()
"""
# Its notes: WORLD-RANK-PID.
WAITS = """
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
world, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
(here / f"{world}-{rank}-{os.getpid()}").touch()
while not (here / "end").exists() and not (here / f"end-{world}-{rank}").exists():
    time.sleep(0.01)
if (here / f"fail-{world}-{rank}").exists():
    (here / f"fail-{world}-{rank}").unlink()
    sys.exit(1)
"""


@pytest.fixture
def waits(tmp_path):
    """A script that ends when a file says so."""
    path = tmp_path / "waits.py"
    path.write_text(WAITS)
    return path


@pytest.fixture
def place(jobs):
    """Of the machines' store, where they meet."""
    place = f"127.0.0.1:{free_port()}"
    with serving(jobs, place):
        yield place


@contextlib.contextmanager
def serving(jobs, place):
    store = jobs.start(ROOT / "launch/store.py", place)
    yield store
    store.kill()
    store.wait()


def machine(jobs, place, script, *flags, nodes="1:3", conf="", **env):
    return jobs.start(
        ROOT / "launch/torchrun.py",
        f"--nnodes={nodes}",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        "--rdzv_id=job",
        "--local_addr=127.0.0.1",
        f"--rdzv_endpoint={place}",
        f"--rdzv_conf=is_host=0,keep_alive_interval=1{conf}",
        script,
        *flags,
        PACE="0.02",
        **env,
    )


def handler(place, address="0.0.0.0"):
    conf = dict(is_host="0", last_call_timeout="1", keep_alive_interval="1", keep_alive_max_attempt="3")
    return registry.get_rendezvous_handler(
        RendezvousParameters("c10d", place, "job", 1, 3, local_addr=address, **conf)
    )


def dies_as_all_have_come(place, address):
    """The address orders the machine among the others."""
    one = handler(place, address)
    until(lambda: len(known(place).participants) == 2, "the others")
    one._start_heartbeats = lambda: os._exit(0)  # torch's next step once all have come
    one.next_rendezvous()


def two_complete(jobs, place, run):
    assert_all_end([machine(jobs, place, ROOT / "train_ddp.py", *PACED, "--run-dir", run) for _ in range(2)])
    assert lives(run)[-1]["world"] == 2 and audit(run) == CLEAN


@pytest.mark.parametrize("address", ["0.0.0.0", "9.9.9.9"], ids=["first", "last"])
def test_a_machine_that_dies_as_all_have_come_does_not_end_the_others(jobs, place, run, address):
    with child(lambda: dies_as_all_have_come(place, address)):
        two_complete(jobs, place, run)


def test_a_machine_that_dies_before_its_ranks_have_come_keeps_no_rank_waiting(jobs, place, tmp_path, run):
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    dying = machine(jobs, place, script)
    two_complete(jobs, place, run)
    dying.wait()


@pytest.fixture
def pair(jobs, place, waits):
    """Two machines whose ranks have begun."""
    nodes = [machine(jobs, place, waits) for _ in range(2)]
    begun(waits, 2, 2)
    return nodes


def begun(script, world, count):
    """Waits until so many processes have begun in a world of this size."""
    until(lambda: len([*script.parent.glob(f"{world}-*")]) == count, f"{count} ranks of {world}")


def end(script, name="end"):
    (script.parent / name).touch()


def known(place):
    """What the store knows of the machines."""
    eye = handler(place)
    eye._state_holder.sync()
    return eye._state_holder.state


def silence(place):
    """Nothing was heard of the machines for a minute, as if the store, or they, had been stopped."""
    holder = handler(place)._state_holder
    while True:
        holder._last_sync_time = -1
        holder.sync()
        beats = holder.state.last_heartbeats
        beats.update((node, datetime.fromtimestamp(0, timezone.utc)) for node in beats)
        holder.mark_dirty()
        if holder.sync():
            return


def die(node):
    """The whole machine: nothing of it saves or says good-bye."""
    for pid in family(node.pid):
        node.jobs.kill(pid, signal.SIGSTOP)
    for pid in family(node.pid):
        node.jobs.kill(pid)


def assert_all_end(nodes, codes=(0, 0)):
    try:
        until(lambda: None not in [node.poll() for node in nodes], "all machines to end")
    finally:
        print(*[node.output for node in nodes], sep="\n")
    assert [node.wait() for node in nodes] == [*codes]
    assert not any(word in node.output for node in nodes for word in ("Traceback", "frame #"))


def end_of_rank_0(script, nodes):
    """The machine of rank 0, which has completed, and the other one."""
    pid = int(next(script.parent.glob("2-0-*")).name.rpartition("-")[2])
    nodes = sorted(nodes, key=lambda node: pid not in family(node.pid))
    end(script, "end-2-0")
    until(lambda: pid not in family(nodes[0].pid), "the end of rank 0")
    return nodes


def test_a_machine_that_dies_as_the_others_have_completed_costs_them_a_minute(waits, pair):
    first, last = end_of_rank_0(waits, pair)
    die(last)
    assert_all_end([first], [0])


def test_a_machine_that_was_not_needed_ends_well_and_waits_longer_than_for_a_meeting(jobs, place, waits):
    nodes = [machine(jobs, place, waits, nodes="1:2") for _ in range(2)]
    begun(waits, 2, 2)
    spare = machine(jobs, place, waits, nodes="1:2", conf=",join_timeout=1")
    until(lambda: known(place).redundancy_list, "the third machine")
    last = time.monotonic() + 2  # twice as long as it would wait for a meeting
    until(lambda: time.monotonic() > last or spare.poll() is not None, "a while")
    end(waits)
    assert_all_end([*nodes, spare], (0, 0, 0))


def test_machines_that_nobody_has_heard_of_meet_again_before_others_meet_without_them(place, waits, pair):
    silence(place)
    begun(waits, 2, 4)
    end(waits)
    assert_all_end(pair)


@pytest.mark.parametrize("meeting", [True, False])
def test_the_store_may_end_and_be_started_again(jobs, waits, meeting):
    place = f"127.0.0.1:{free_port()}"
    with serving(jobs, place):
        nodes = [machine(jobs, place, waits, conf=",last_call_timeout=5") for _ in range(2)]
        # both: one that connects as the store ends has not met anybody, and gives up
        until(lambda: len(known(place).participants) == 2, "both machines") if meeting else begun(waits, 2, 2)
    with serving(jobs, place):
        begun(waits, 2, 2 if meeting else 4)
        end(waits)
        assert_all_end(nodes)


def test_a_machine_that_gives_up_does_not_end_the_job_for_the_others(jobs, place, waits):
    first = machine(jobs, place, waits, nodes="2:3", conf=",join_timeout=1")
    assert "too few machines came" in first.ends_with(1)
    nodes = [machine(jobs, place, waits, nodes="2:3") for _ in range(2)]
    begun(waits, 2, 2)
    end(waits)
    assert_all_end(nodes)


def test_a_wrong_machine_is_refused_before_it_joins_and_the_others_train_on(jobs, place, run):
    words = [ROOT / "train_ddp.py", *PACED, "--epochs=999", "--run-dir", run]
    nodes = [machine(jobs, place, *words) for _ in range(2)]
    until(lambda: lives(run) and lives(run)[-1]["world"] == 2, "both machines")
    said = machine(jobs, place, *words, "--seed=7").ends_with(2)
    assert "this machine has --seed 7, the others train with 0" in said and len(said.splitlines()) <= 4, said
    count = len(lives(run))
    (run / "control/stop").touch()
    assert_all_end(nodes, (143, 143))
    assert len(lives(run)) == count


@pytest.mark.parametrize("ahead", [-8, -3.5, -2, 0, 2, 3.5, 8, 3600])
def test_machines_whose_clocks_differ_by_over_3_seconds_are_told_both_times(ahead):
    """The other one beats every tenth of a second by its clock."""
    node = dynamic_rendezvous._NodeDesc("host7", 1, 1)
    agent = Agent.__new__(Agent)
    agent.beats = lambda: {node: datetime.fromtimestamp(round(time.time() + ahead, 1))}
    both = r"the clock here says .{24}, that of host7 .{24}\n"
    with refusal(both) if abs(ahead) > 3 else contextlib.nullcontext():
        agent.refuse_another_clock()


def test_the_mistake_of_one_machine_does_not_end_the_job_for_the_others(jobs, place, waits, pair):
    mistaken = waits.parent / "mistaken.py"
    mistaken.write_text("import sys\nsys.exit(2)\n")
    machine(jobs, place, mistaken).ends_with(2)
    late = machine(jobs, place, waits)
    begun(waits, 3, 2 + 3)
    end(waits)
    assert_all_end([*pair, late], (0, 0, 0))


def test_agents_of_one_name_and_one_process_number_as_in_two_containers_are_two_machines():
    def node(world):
        replace_names()
        return dynamic_rendezvous.DynamicRendezvousHandler._node_desc_generator.generate("10.0.0.1").local_id

    assert len({*fork_ranks(2, node)}) == 2


def test_a_strangers_pickle_in_the_store_runs_no_code_and_ends_the_agent_with_a_line(jobs, place, waits):
    node = machine(jobs, place, waits)
    begun(waits, 1, 1)
    state = base64.b64encode(pickle.dumps(Bomb())).decode()
    handler(place)._store.set("torch.rendezvous.job", state)
    said = node.ends_with(1)
    assert "The rendezvous state is corrupt" in said and not os.path.exists("canary"), said
