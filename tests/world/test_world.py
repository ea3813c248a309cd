import faulthandler
import gc
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from jobs import listening, until
from ranks import fork_ranks
from refusals import refusal

from common.errors import UserError
from common.options import Options
from common.place import here
from common.world import gather, join
from common.world import rendezvous as meeting
from common.world import world as worlds
from common.world.rendezvous import fresh_store
from common.world.world import choose_devices


def test_without_torchrun_the_world_is_one_rank_in_a_process_made_ready():
    def live(_):
        clean_environment()
        gc.disable()  # as the imports do
        called = []
        worlds.keep_memory = lambda: called.append(True)
        world = join(Options(device="cpu"))
        return (
            world.rank,
            world.size,
            world.device.type,
            called,
            gc.isenabled(),
            gc.get_freeze_count() > 1000,
        )

    assert fork_ranks(1, live) == [(0, 1, "cpu", [True], True, True)]


def clean_environment():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)


def meet_twice_at_one_agent(world):
    """Two lives at one shared store, as torchrun makes them: what the first one left must not be read by the
    second.
    """
    if world.rank == 1:
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world.store.set("agent", str(agent.port))
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=world.store.get("agent").decode(),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    ports = []
    for life in range(3):
        store = fresh_store(world.rank, world.size)
        ports.append(store.port)
        if world.rank == 0:
            store.set("word", f"life {life}")
            assert listening(os.getpid()) == {"0100007F"}, "on the master address alone"
        assert store.get("word") == f"life {life}".encode()
        world.barrier()  # its host must stay until all have read
    return ports


@pytest.mark.parametrize("size", [2, 4])
def test_every_life_has_a_store_of_its_own_although_torchrun_shares_one(size):
    found = fork_ranks(size, meet_twice_at_one_agent)
    assert all(ports == found[0] for ports in found) and len(set(found[0])) == 3


def devices_of(opts, local_rank, local_size):
    return choose_devices(opts, here()._replace(local_rank=local_rank, local_size=local_size))


def test_the_devices_of_a_process_and_those_that_do_not_exist(monkeypatch):
    with refusal("--device cuda: torch sees no GPU of this kind.*\nchoose among auto, cpu"):
        devices_of(Options(device="cuda"), 0, 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of(Options(), 1, 2) == (torch.device("cuda", 1),)
    with refusal("--devices cpu,tpu: there are cpu, cuda:0, cuda:1"):
        devices_of(Options(devices=("cpu", "tpu")), 0, 1)
    assert len(devices_of(Options(script="mp"), 0, 1)) == 2
    assert len(devices_of(Options(script="mp", devices=("cpu", "cuda", "cuda:1")), 0, 1)) == 3
    with refusal("cuda:2"):
        devices_of(Options(script="mp", devices=("cuda:1", "cuda:2")), 0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")  # a process on each of two machines: each drives one GPU
    assert devices_of(Options(script="mp"), 0, 1) == (torch.device("cuda", 0),)
    for rank in range(3):
        with refusal("3 processes on this machine but 2 GPUs"):
            devices_of(Options(), rank, 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # each process sees a GPU of its own
    assert devices_of(Options(), 1, 2) == (torch.device("cuda", 0),)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert devices_of(Options(device="xpu"), 1, 2) == (torch.device("xpu", 1),)


def join_on_gpus(world, uuids):
    """(what `join` says on GPUs with these uuids, torch's variables, a limit) when NCCL is to meet."""
    os.environ.update(RANK=str(world.rank), WORLD_SIZE="2", LOCAL_RANK=str(world.rank), LOCAL_WORLD_SIZE="2")
    os.environ["CUDA_VISIBLE_DEVICES"] = "some"
    torch.cuda.device_count = lambda: len(uuids)
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[device.index])
    worlds.fresh_store = lambda *_: dist.PrefixStore(uuids, world.store)
    limits = []

    def meet(*_, **__):
        faulthandler.cancel_dump_traceback_later()
        raise KeyboardInterrupt

    dist.init_process_group = meet
    faulthandler.dump_traceback_later = lambda seconds, **how: limits.append((seconds, how))
    with pytest.raises((KeyboardInterrupt, UserError)) as found:
        join(Options())
    return str(found.value), {name for name, value in os.environ.items() if value == "0"}, limits


def test_when_nccl_meets_torchs_watchdogs_end_no_process_and_the_meeting_has_an_end():
    for _, off, limits in fork_ranks(2, lambda world: join_on_gpus(world, "ab")):
        assert off >= {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "TORCH_NCCL_RETHROW_CUDA_ERRORS",
            "TORCH_NCCL_ENABLE_MONITORING",
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
        }
        assert limits == [(5 * worlds.MEETING.total_seconds(), {"exit": True, "file": 2})]


@pytest.mark.parametrize("uuids, allowed, refused", [("a", "", 1), ("a", "1", 0), ("ab", "", 0)])
def test_two_processes_with_one_gpu_are_refused(monkeypatch, uuids, allowed, refused):
    """CUDA_VISIBLE_DEVICES=0: each takes it for its own. NCCL would fail, or train at half the speed."""
    if allowed:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", allowed)
    words = [words for words, *_ in fork_ranks(2, lambda world: join_on_gpus(world, uuids)) if words]
    assert len(words) == refused and all("has this GPU" in line for line in words)


def test_a_name_that_is_a_loopback_is_refused_between_machines_and_not_used_by_gloo(monkeypatch):
    """Debian's installer writes `127.0.1.1 node01` into /etc/hosts: others would knock there in vain."""
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "node01",
        "MASTER_PORT": 29400,
    }.items():
        monkeypatch.setenv(name, str(value))
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with refusal("MASTER_ADDR=node01 is 127.0.1.1 .*\n.*--local_addr=ADDRESS"):
        meeting._open_store("node01", 0)
    assert meeting.interface_towards("127.0.0.1") == "lo"


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


def rank_2_dies_before_anybody_watches(world):
    if world.rank == 2:
        os._exit(1)
    with pytest.raises(RuntimeError):
        gather(world, "loaded")
    if world.rank == 0:
        os._exit(7)  # with its store, by which rank 1 hears of it


def test_ranks_do_not_wait_for_one_that_has_died_before_anybody_watches():
    """A machine that dies while a checkpoint is loaded: they waited for an hour."""
    assert fork_ranks(3, rank_2_dies_before_anybody_watches, may_die=[0, 2]) == [7, None, 1]


def test_lifelines_go_over_ipv6_too(monkeypatch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("without IPv6")

    class Store(dict):
        host = "::1"
        set = dict.__setitem__

        def get(self, name):
            return until(lambda: super(Store, self).get(name), name)

    store = Store()
    with ThreadPoolExecutor() as pool:
        lines = sum(pool.map(lambda rank: meeting.lifelines(store, rank, 2), (0, 1)), [])
    assert len(lines) == 2
    for line in lines:
        line.close()
