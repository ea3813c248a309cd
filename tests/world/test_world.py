import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fork_ranks

from common.errors import UserError
from common.options import Options
from common.place import here
from common.world import World, join, lifelines, same_everywhere
from common.world import rendezvous as meeting
from common.world import world as worlds
from common.world.rendezvous import _find_store, fresh_store
from common.world.world import choose_devices

ROOT = Path(__file__).resolve().parents[2]


def test_without_torchrun_the_world_is_one_rank_and_opens_no_socket():
    (found,) = fork_ranks(1, lambda _: clean_environment() or join(Options(device="cpu")))
    assert (found.rank, found.size, found.backend, found.device.type) == (0, 1, "none", "cpu")


def test_the_garbage_collector_which_the_imports_do_without_is_back_for_the_training():
    def live(_):
        clean_environment()
        gc.disable()
        join(Options(device="cpu"))
        return gc.isenabled() and gc.get_freeze_count() > 1000

    assert fork_ranks(1, live) == [True]


def clean_environment():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)


FAULTS = """
import ctypes, resource
from common.world.world import keep_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
for keep in (False, True):
    if keep:
        keep_memory()
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [libc.malloc(40_000_000) for _ in range(3)]
        for block in blocks:
            libc.memset(block, 1, 40_000_000)
        for block in blocks:
            libc.free(block)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_what_a_step_frees_stays_with_the_process_for_the_next_step(monkeypatch):
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("not glibc")
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=True)
    found = list(map(int, done.stdout.split()))  # pages the kernel had to find for the same 120 MB
    assert min(found[:4]) > 25_000 and max(found[5:]) < 1000, found
    called = []
    monkeypatch.setattr(worlds, "keep_memory", lambda: called.append(True))
    assert fork_ranks(1, lambda _: clean_environment() or join(Options(device="cpu")) and called) == [[True]]


def test_collectives_of_one_rank_are_the_identity():
    (found,) = fork_ranks(1, lambda world: [world.all_sum(torch.ones(2)).tolist(),
                                            world.all_gather(torch.ones(1))[0].item(),
                                            world.broadcast(torch.ones(1), 0).item(), world.barrier("a")])
    assert found == [[1, 1], 1, 1, None]


def speak_up(world, wrong):
    try:
        with world.all_or_none("place"):
            if world.rank == wrong:
                raise UserError("the fact\nthe way out", code=3)
        return "went on"
    except UserError as error:
        return str(error), error.code


@pytest.mark.parametrize("wrong", [0, 2])
def test_what_one_rank_refuses_is_refused_on_all(wrong):
    assert fork_ranks(3, speak_up, wrong) == [("the fact\nthe way out", 3)] * 3
    assert fork_ranks(3, speak_up, -1) == ["went on"] * 3


def meet_twice_at_one_agent(world):
    """Two lives at one shared store, as torchrun makes them: what the first one left must not be read by the
    second.
    """
    if world.rank == 0:
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world.store.set("agent", str(agent.port))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=world.store.get("agent").decode(),
                      TORCHELASTIC_USE_AGENT_STORE="True")
    ports = []
    for life in range(3):
        store = fresh_store(world.rank, world.size)
        ports.append(store.port)
        if world.rank == 0:
            store.set("word", f"life {life}")
        assert store.get("word") == f"life {life}".encode()
        world.barrier(f"end of {life}")  # its host must stay until all have read
    return ports


@pytest.mark.parametrize("size", [2, 4])
def test_every_life_has_a_store_of_its_own_although_torchrun_shares_one(size):
    found = fork_ranks(size, meet_twice_at_one_agent)
    assert all(ports == found[0] for ports in found) and len(set(found[0])) == 3


def test_the_devices_of_a_process_and_those_that_do_not_exist(monkeypatch):
    with pytest.raises(UserError, match="--device cuda"):
        choose_devices(Options(device="cuda"), 0, 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices(Options(), 1, 2) == (torch.device("cuda", 1),)
    for rank in range(3):
        with pytest.raises(UserError, match="3 processes on this machine but 2 GPUs"):
            choose_devices(Options(), rank, 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # each process sees a GPU of its own
    assert choose_devices(Options(), 1, 2) == (torch.device("cuda", 0),)


def by_hand(world, machines):
    """What `join` makes of RANK, WORLD_SIZE and MASTER_* alone, on these machines with a GPU each."""
    clean = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    if world.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            world.store.set("port", str(probe.getsockname()[1]))
    clean_environment()
    os.environ.update(clean, MASTER_PORT=world.store.get("port").decode())
    world.barrier("all are here")  # else its end could end another rank's beginning
    dist.destroy_process_group()
    meeting.machine_id = lambda: machines[world.rank]
    asked = []
    worlds.choose_devices = lambda opts, rank, size: (
        asked.append((rank, size)) or (torch.device("cpu"),))
    found = join(Options())
    found.barrier("end")
    return found.node, found.local_rank, found.local_size, *asked


def test_by_hand_each_process_finds_out_who_is_on_its_machine():
    """One GPU on each of two machines is the first of a world of one there, not the second of two; and it
    owns its folder.
    """
    assert fork_ranks(2, by_hand, "ab") == [(0, 0, 1, (0, 1)), (1, 0, 1, (0, 1))]
    assert fork_ranks(3, by_hand, "bab") == [(0, 0, 2, (0, 2)), (1, 0, 1, (0, 1)), (0, 1, 2, (1, 2))]


def test_groups_of_stages_wait_no_longer_than_the_world(monkeypatch):
    waits = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout=None: waits.append(timeout))
    World(0, 2, 0, 2, 0, (), "life", 0).in_stages(2, timedelta(seconds=8))
    assert waits == [timedelta(seconds=8)] * 3


def what_differs(world, facts):
    try:
        same_everywhere(world, facts[world.rank])
        return None
    except UserError as error:
        return str(error).splitlines()[0]


def test_ranks_that_run_different_things_end_with_the_names_of_two_and_their_values():
    facts = [{"torch": "2", "options": "a"}, {"torch": "2", "options": "a"}, {"torch": "2", "options": "b"}]
    said = "the ranks run different things: rank 0 has options a, rank 2 has options b"
    assert fork_ranks(3, what_differs, facts) == [said] * 3
    assert fork_ranks(2, what_differs, facts) == [None] * 2


def listeners(pids):
    """Addresses that these processes listen on, from /proc/net/tcp and tcp6."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                link = os.readlink(fd)
            except OSError:
                continue
            inodes |= {link[8:-1]} if link.startswith("socket:[") else set()
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:  # 0A: LISTEN
                found.add(words[1].split(":")[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_on_one_machine_the_workers_listen_on_loopback_only_and_die_with_their_agent(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train_ddp.py",
               "--run-dir", str(tmp_path),
               "--epochs", "1000", "--no-tensorboard"]
    agent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             env=dict(os.environ, OMP_NUM_THREADS="1"))
    try:
        pids = wait_for(lambda: pids_of(tmp_path))
        assert listeners(pids) <= {"0100007F", "00000000000000000000000001000000",
                                   "0000000000000000FFFF00000100007F"}
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        wait_for(lambda: not any(alive(pid) for pid in pids), seconds=10)
    finally:
        agent.kill()
        agent.wait()


def pids_of(run):
    try:
        lines = (run / "ledger.jsonl").read_text().splitlines()
        return next((event["pids"] for event in map(json.loads, lines) if event["event"] == "life"), None)
    except (FileNotFoundError, ValueError):
        return None


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(fact, seconds=90):
    deadline = time.monotonic() + seconds
    while not (found := fact()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def test_rank_0s_store_is_bound_to_the_master_address_alone():
    def addresses(world):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        store = fresh_store(0, 1)
        return store.port and listeners([os.getpid()])

    (found,) = fork_ranks(1, addresses)
    assert found == {"0100007F"}


def test_nobody_asks_a_store_before_it_listens(monkeypatch):
    """A TCPStore that comes too early waits for up to a second, which was half a second of every restart."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        listens = threading.Event()
        monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: listens.is_set())
        late = threading.Timer(0.1, lambda: (listens.set(), place.listen()))
        late.start()
        assert _find_store(*place.getsockname())
        late.join()


def test_a_name_that_is_a_loopback_is_refused_between_machines_and_not_used_by_gloo(monkeypatch):
    """Debian's installer writes `127.0.1.1 node01` into /etc/hosts: others would knock there in vain."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "node01")
    monkeypatch.setenv("MASTER_PORT", "29400")
    monkeypatch.setattr(meeting, "_listening_address", lambda *_: (socket.AF_INET, ("127.0.1.1", 0)))
    with pytest.raises(UserError, match="MASTER_ADDR=node01 is 127.0.1.1 .*\n.*--local_addr=ADDRESS"):
        meeting._open_store(here(), 0)
    assert meeting.interface_towards("127.0.0.1") == "lo"
    monkeypatch.setattr(meeting, "interface_towards", lambda host: f"towards {host}")
    env = {}
    meeting.choose_interface(here(), 1, env)
    assert env["GLOO_SOCKET_IFNAME"] == "towards node01"


def rank_1_never_comes(world):
    if world.rank == 1:
        return 0.0
    meeting.MEETING = timedelta(seconds=1)
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(agent.port)
    with pytest.raises(TimeoutError, match="1 of 2 processes came"):
        fresh_store(0, 2)


def test_ranks_that_wait_for_one_that_never_comes_give_up_and_their_agents_meet_again():
    assert meeting.MEETING <= timedelta(minutes=2)
    fork_ranks(2, rank_1_never_comes)


@pytest.mark.parametrize("host, lines", [("::1", 1), ("127.0.0.1", 1), ("192.0.2.1", 0)])
def test_lifelines_go_over_ipv6_too_and_no_rank_waits_for_those_that_cannot_be(host, lines):
    class Store(dict):
        def set(self, name, value):
            self[name] = value
            there.set()

        def get(self, name):
            assert there.wait(20)
            return self[name]

    def take(rank):
        try:
            return lifelines(store, rank, 2)
        except OSError:
            return []

    store, there = Store(), threading.Event()
    store.host = host
    with ThreadPoolExecutor() as pool:
        for found in pool.map(take, (0, 1)):
            assert len(found) == lines
            [line.close() for line in found]
