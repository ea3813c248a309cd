import faulthandler
import gc
import os
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from jobs import listening
from ranks import fork_ranks
from refusals import refusal

from common import place
from common.errors import UserError
from common.extras import gpus, machines
from common.options import Options
from common.place import here
from common.world import gather, join
from common.world import rendezvous as meeting
from common.world import world as worlds
from common.world.rendezvous import fresh_store
from common.world.world import same_everywhere, visible_devices


def test_without_torchrun_the_world_is_one_rank_in_a_process_made_ready():
    def live(_):
        for name in place.MEETING:
            os.environ.pop(name, None)
        gc.disable()  # as the imports do
        world = join(Options(device="cpu"))
        return world.rank, world.size, world.device.type, gc.isenabled()

    assert fork_ranks(1, live) == [(0, 1, "cpu", True)]


def know_an_agent(port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")


def meet_at_one_agent(world):
    """Lives at one shared store, as torchrun makes them: no life must read what the one before has left."""
    if world.rank == 1:
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world.store.set("agent", str(agent.port))
    know_an_agent(world.store.get("agent").decode())
    ports = set()
    for life in range(3):
        store = fresh_store(world.rank, world.size)
        ports.add(store.port)
        if world.rank == 0:
            store.set("word", f"life {life}")
            assert listening(os.getpid()) == {"0100007F"}, "on the master address alone"
        assert store.get("word") == f"life {life}".encode()
        world.barrier()  # its host must stay until all have read
    return ports


def test_every_life_has_a_store_of_its_own_although_torchrun_shares_one():
    first, *others = fork_ranks(3, meet_at_one_agent)
    assert len(first) == 3 and others == [first] * 2


GPUS = tuple(torch.device("cuda", i) for i in range(4))
WATCHDOGS = "ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"


def test_the_devices_that_a_process_sees_and_those_that_do_not_exist(monkeypatch):
    def seen(placed=(), **flags):
        return [*map(str, visible_devices(Options(**flags), here(), placed))]

    with refusal("--device cuda: torch sees no GPU of this kind.*\nchoose among auto, cpu"):
        seen(device="cuda")
    assert [len(seen(script=script)) for script in ("ddp", "dp", "mp")] == [1, 1, 2], "train_mp.py: cpu,cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert seen() == seen(script="mp") == seen(GPUS[:2]) == ["cuda:0", "cuda:1"]
    assert len(seen(script="mp", devices=("cpu", "cuda", "cuda:1"))) == 3
    for words, placed, flags in (
        ("--devices cpu,tpu: there are cpu, cuda:0, cuda:1", (), {"devices": ("cpu", "tpu")}),
        ("--devices cannot take effect: the net lies on cuda:0, cuda:1", GPUS[:2], {"devices": ("cpu",)}),
    ):
        with refusal(words):
            seen(placed, **flags)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert seen(device="xpu") == ["xpu:0", "xpu:1"]


def share_of(world, script, seen):
    """The devices of a rank, as uuids; `seen` has those that each rank sees."""
    uuids = seen[world.rank]
    gpus.uuid_of = lambda gpu: uuids[gpu.index]
    try:
        found = gpus.own_share(GPUS[: len(uuids)], Options(script=script), here(), world.store)
    except UserError as error:
        return str(error).splitlines()[0]
    return "".join(map(gpus.uuid_of, found))


@pytest.mark.parametrize(
    "script, seen, wanted",
    [
        ("dp", ["abcd"], ["abcd"]),
        ("ddp", ["abcd"] * 3, ["a", "b", "c"]),
        ("mp", ["abcd"] * 2, ["ab", "cd"]),
        ("mp", ["abc"] * 2, ["a", "b"]),
        ("mp", ["ab", "cd"], ["ab", "cd"]),  # Slurm's --gpus-per-task=2
        ("ddp", ["ab", "cd"], ["a", "c"]),
        ("ddp", ["ab"] * 3, ["3 processes on this machine but 2 GPUs are visible"] * 3),
    ],
    ids=str,
)
def test_each_process_takes_an_equal_part_of_the_gpus_that_it_shares_with_others(script, seen, wanted):
    assert fork_ranks(len(seen), share_of, script, seen) == wanted


def test_processes_on_several_machines_share_no_gpus():
    seen = ["ab", "ab", "cd", "cd"]
    assert fork_ranks(4, share_of, "mp", seen, node_size=2) == ["a", "b", "c", "d"]
    assert fork_ranks(2, share_of, "mp", ["ab"] * 2, node_size=1) == ["ab", "ab"]


def join_on_gpus(world, script, seen):
    """What `join` says when NCCL is to meet; to which device that is bound.

    `seen` has the uuids of the GPUs that each rank sees.
    """
    own = seen[world.rank]
    os.environ["CUDA_VISIBLE_DEVICES"] = "some"
    torch.cuda.device_count = lambda: len(own)
    torch.cuda.set_device = lambda device: None
    gpus.uuid_of = lambda gpu: own[gpu.index]
    worlds.fresh_store = lambda *_: dist.PrefixStore("gpus", world.store)
    limits = []

    def meet(*_, device_id, **__):
        faulthandler.cancel_dump_traceback_later()
        assert limits == [(5 * worlds.MEETING_TIME.total_seconds(), {"exit": True, "file": 2})]
        assert {os.environ[f"TORCH_NCCL_{name}"] for name in WATCHDOGS} == {"0"}
        raise UserError(str(device_id))

    dist.init_process_group = meet
    faulthandler.dump_traceback_later = lambda seconds, **how: limits.append((seconds, how))
    with pytest.raises(UserError) as found:
        join(Options(script=script))
    return str(found.value)


@pytest.mark.parametrize(
    "script, seen, machines, allowed, said",
    [
        ("ddp", ["abcd"] * 2, 1, "", {"cuda:0", "cuda:1"}),
        # bound to one GPU it would refuse a collective on the others: "backend constrained to cuda:0"
        ("mp", ["abcd"] * 2, 1, "", {"None"}),
        ("ddp", ["a", "b"], 1, "", {"cuda:0"}),
        # two that take themselves for alone on a machine, say: NCCL would fail, or train at half the speed
        ("ddp", ["a", "a"], 2, "", {"cuda:0", "another rank has this GPU"}),
        ("ddp", ["a", "a"], 2, "1", {"cuda:0"}),
    ],
)
def test_nccl_meets_with_an_end_and_without_watchdogs_on_the_one_gpu_of_each_process(
    monkeypatch, script, seen, machines, allowed, said
):
    if allowed:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", allowed)
    found = fork_ranks(2, join_on_gpus, script, seen, node_size=2 // machines)
    assert all(any(words in line for line in found) for words in said), found


def test_a_name_that_is_a_loopback_is_refused_between_machines_and_not_used_by_gloo(monkeypatch):
    """Debian's installer writes `127.0.1.1 node01` into /etc/hosts: others would knock there in vain."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(meeting, "here", lambda: here()._replace(size=2, local_size=1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with refusal("MASTER_ADDR=node01 is 127.0.1.1 .*\n.*--local_addr=ADDRESS"):
        meeting._open_store("node01", 0)
    assert machines.interface_towards("127.0.0.1") == "lo"


def rank_1_never_comes(world):
    if world.rank == 1:
        return 0.0
    meeting.MEETING_TIME = timedelta(seconds=1)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    know_an_agent(str(agent.port))
    with pytest.raises(TimeoutError, match="1 of 2 processes came"):
        fresh_store(0, 2)


def test_ranks_that_wait_for_one_that_never_comes_give_up_and_their_agents_meet_again():
    assert meeting.MEETING_TIME <= timedelta(minutes=2)
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


def connect_first(world, host):
    """As another user of this machine may, who reads no store: strangers come before the port is told."""
    real = meeting._listen
    strangers = []

    def listen(*place):
        listener = real(*place)
        for first_words in (b"", b"0" * 32, b"3 step"):
            strangers.append(socket.create_connection(listener.getsockname()[:2]))
            strangers[-1].sendall(first_words)
        strangers[0].shutdown(socket.SHUT_WR)
        return listener

    meeting._listen = listen
    store = SimpleNamespace(host=host, get=world.store.get, set=world.store.set)
    lines = meeting.lifelines(store, world.rank, world.size)
    for line in lines:
        line.sendall(b"moved\n")
    return [line.recv(100) for line in lines]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_stranger_who_connects_first_takes_no_ranks_lifeline(host):
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("without IPv6")
    assert fork_ranks(3, connect_first, host) == [[b"moved\n"] * 2, [b"moved\n"], [b"moved\n"]]


def two_machines(world):
    machine = {"machine": f"boot {world.rank % 2}"}
    machines.this_process = lambda: machine
    try:
        return machines.refuse_several_machines(world.store, world.rank, world.size)
    except UserError as error:
        return str(error).splitlines()[0]


def test_ranks_of_two_machines_without_local_world_size_are_refused_on_all():
    said = "LOCAL_WORLD_SIZE is not set, and the 3 ranks are on 2 machines"
    assert fork_ranks(3, two_machines) == [said] * 3


def odd_one(world, odd, runs):
    facts = {"data": "other" if world.rank == odd else "ours"}
    try:
        return same_everywhere(world, facts, runs[world.rank])
    except UserError as error:
        return error.code


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    "run_of_the_odd, run_of_the_others, may_try_again",
    [
        ("ours", "ours", True),
        (None, "ours", True),  # each machine has its folder
        (None, None, False),  # nothing is saved yet
        ("other", "ours", False),  # two runs
    ],
)
def test_the_odd_rank_ends_for_good_and_those_that_agree_with_the_run_may_try_again(
    odd, run_of_the_odd, run_of_the_others, may_try_again
):
    runs = [run_of_the_odd if rank == odd else run_of_the_others for rank in range(3)]
    codes = fork_ranks(3, odd_one, odd, [{"data": run} if run else {} for run in runs])
    assert codes == [1 if may_try_again and rank != odd else 2 for rank in range(3)]


def test_gpus_that_a_person_names_and_that_are_not_there_are_told(monkeypatch, capsys):
    monkeypatch.setattr(worlds, "gpus", tuple)
    for named in ("0,2", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible_devices(Options(), here()) == (torch.device("cpu"),)
        assert ("CUDA_VISIBLE_DEVICES is 0,2" in capsys.readouterr().err) == bool(named)


def sockets_of_a_start(world, most_in_a_mesh):
    def sockets():
        return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())

    dist.destroy_process_group()
    worlds.MOST_IN_A_MESH = most_in_a_mesh
    before = sockets()
    worlds._init_process_group(dist.PrefixStore("again", world.store), here(), (torch.device("cpu"),))
    assert world.all_sum(torch.ones(1)).item() == world.size
    made = sockets() - before
    world.barrier()
    return made


@pytest.mark.parametrize("most_in_a_mesh, more", [(2, 0), (256, 4)])
def test_in_a_large_world_gloo_connects_a_rank_with_those_that_it_talks_to_alone(most_in_a_mesh, more):
    """All with all are 131,000 sockets on a machine of 16,384 ranks."""
    few, many = (max(fork_ranks(size, sockets_of_a_start, most_in_a_mesh)) for size in (4, 8))
    assert many - few == more
