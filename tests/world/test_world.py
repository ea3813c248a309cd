import faulthandler
import gc
import os
import socket
import threading
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
from common.extras import machines
from common.options import Options
from common.place import here
from common.world import gather, join
from common.world import rendezvous as meeting
from common.world import world as worlds
from common.world.rendezvous import fresh_store
from common.world.world import own_share, same_everywhere, visible_devices


def test_without_torchrun_the_world_is_one_rank_in_a_process_made_ready():
    def live(_):
        clean_environment()
        gc.disable()  # as the imports do
        called = []
        worlds.keep_memory = lambda: called.append(True)
        world = join(Options(device="cpu"))
        return world.rank, world.size, world.device.type, called, gc.isenabled()

    assert fork_ranks(1, live) == [(0, 1, "cpu", [True], True)]


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
        if life == 1 and world.rank == 0:  # one whose rank 0 has died before all had come
            dist.PrefixStore("life", meeting._find_store("127.0.0.1", lambda: here().port)).set("port", "1")
        world.barrier()
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


GPUS = tuple(torch.device("cuda", i) for i in range(4))


def test_the_devices_that_a_process_sees_and_those_that_do_not_exist(monkeypatch):
    def seen(**flags):
        return visible_devices(Options(**flags), here())

    with refusal("--device cuda: torch sees no GPU of this kind.*\nchoose among auto, cpu"):
        seen(device="cuda")
    assert [len(seen(script=script)) for script in ("ddp", "dp", "mp")] == [1, 1, 2], "train_mp.py: cpu,cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert seen() == seen(script="mp") == GPUS[:2]
    with refusal("--devices cpu,tpu: there are cpu, cuda:0, cuda:1"):
        seen(devices=("cpu", "tpu"))
    assert len(seen(script="mp", devices=("cpu", "cuda", "cuda:1"))) == 3
    with refusal("cuda:2"):
        seen(script="mp", devices=("cuda:1", "cuda:2"))
    assert visible_devices(Options(), here(), GPUS[:2]) == GPUS[:2], "a net that is placed"
    with refusal("--devices cannot take effect: the net lies on cuda:0, cuda:1"):
        visible_devices(Options(devices=("cpu",)), here(), GPUS[:2])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert [*map(str, seen(device="xpu"))] == ["xpu:0", "xpu:1"]


def shares(monkeypatch, script, *machines):
    """The devices of each rank, whose machines have for each process the uuids that it sees."""
    store = dist.HashStore()
    seen = [uuids for machine in machines for uuids in machine]
    places = [(rank, len(machine)) for machine in machines for rank in range(len(machine))]

    def share(rank):
        local_rank, local_size = places[rank]
        place = here()._replace(rank=rank, size=len(seen), local_rank=local_rank, local_size=local_size)
        names = GPUS[: len(seen[rank])]
        local.uuids = dict(zip(names, seen[rank], strict=True))
        found = own_share(names, Options(script=script), place, store if len(seen) > 1 else None)
        return "".join(local.uuids[gpu] for gpu in found)

    local = threading.local()
    monkeypatch.setattr(worlds, "uuid_of", lambda gpu: local.uuids[gpu])
    with ThreadPoolExecutor(len(seen)) as pool:
        return [*pool.map(share, range(len(seen)))]


@pytest.mark.parametrize(
    "script, machines, wanted",
    [
        ("ddp", [["abcd"]], ["a"]),
        ("dp", [["abcd"]], ["abcd"]),
        ("mp", [["abcd"]], ["abcd"]),
        ("ddp", [["abcd"] * 3], ["a", "b", "c"]),
        ("mp", [["abcd"] * 2], ["ab", "cd"]),
        ("mp", [["abc"] * 2], ["a", "b"]),
        ("mp", [["ab"], ["cd"]], ["ab", "cd"]),  # a process on each of two machines
        ("mp", [["ab", "cd"]], ["ab", "cd"]),  # Slurm's --gpus-per-task=2
        ("ddp", [["ab", "cd"]], ["a", "c"]),
        ("mp", [["a", "b", "c"]], ["a", "b", "c"]),  # --gpus-per-task=1
        ("ddp", [["a", "b"], ["c", "d"]], ["a", "b", "c", "d"]),
    ],
)
def test_each_process_takes_an_equal_part_of_the_gpus_that_it_shares_with_others(
    monkeypatch, script, machines, wanted
):
    assert shares(monkeypatch, script, *machines) == wanted


@pytest.mark.parametrize("script", ["ddp", "mp"])
def test_more_processes_than_gpus_are_refused(monkeypatch, script):
    with refusal("3 processes on this machine but 2 GPUs are visible"):
        shares(monkeypatch, script, ["ab"] * 3)


def join_on_gpus(world, seen, script="ddp"):
    """(what `join` says when NCCL is to meet, torch's variables, a limit, the device to which NCCL is bound).

    `seen` has the uuids of the GPUs that each rank sees.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = "some"
    own = seen[world.rank]
    torch.cuda.device_count = lambda: len(own)
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=own[device.index])
    worlds.fresh_store = lambda *_: dist.PrefixStore("gpus", world.store)
    limits = []
    bound = []

    def meet(*_, device_id, **__):
        faulthandler.cancel_dump_traceback_later()
        bound.append(device_id)
        raise KeyboardInterrupt

    dist.init_process_group = meet
    faulthandler.dump_traceback_later = lambda seconds, **how: limits.append((seconds, how))
    with pytest.raises((KeyboardInterrupt, UserError)) as found:
        join(Options(script=script))
    return str(found.value), {name for name, value in os.environ.items() if value == "0"}, limits, bound


def test_when_nccl_meets_torchs_watchdogs_end_no_process_and_the_meeting_has_an_end():
    for _, off, limits, _ in fork_ranks(2, lambda world: join_on_gpus(world, "ab")):
        assert off >= {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "TORCH_NCCL_RETHROW_CUDA_ERRORS",
            "TORCH_NCCL_ENABLE_MONITORING",
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
        }
        assert limits == [(5 * worlds.MEETING.total_seconds(), {"exit": True, "file": 2})]


def test_nccl_is_bound_to_the_one_gpu_of_a_process_and_to_none_of_several():
    """It would refuse a collective on the others: "backend constrained to cuda:0"."""
    for script, wanted in (("ddp", [[GPUS[0]], [GPUS[1]]]), ("mp", [[None], [None]])):
        bound = fork_ranks(2, lambda world, script=script: join_on_gpus(world, ["abcd"] * 2, script)[-1])
        assert bound == wanted


@pytest.mark.parametrize("seen, refused", [("aa", "2 processes on this machine"), ("ab", "")])
def test_two_processes_with_one_gpu_are_refused(seen, refused):
    words = [words for words, *_ in fork_ranks(2, lambda world: join_on_gpus(world, seen)) if words]
    assert bool(words) == bool(refused) and all(refused in line for line in words)


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
    assert machines.interface_towards("127.0.0.1") == "lo"


def rank_1_never_comes(world):
    if world.rank == 1:
        return 0.0
    meeting.MEETING = timedelta(seconds=1)
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(agent.port)
    with pytest.raises(RuntimeError, match="joined/1"):
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
        def set(self, name, text):
            self[name] = text.encode()

        def get(self, name):
            return until(lambda: super(Store, self).get(name), name)

    store = Store()
    monkeypatch.setenv("MASTER_ADDR", "::1")
    with ThreadPoolExecutor() as pool:
        lines = sum(pool.map(lambda rank: meeting.lifelines(store, rank, 2), (0, 1)), [])
    assert len(lines) == 2
    for line in lines:
        line.close()


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
def test_the_odd_rank_ends_for_good_and_those_that_agree_with_the_run_may_try_again(odd):
    ours = {"data": "ours"}
    codes = [2 if rank == odd else 1 for rank in range(3)]
    own = [{} if rank == odd else ours for rank in range(3)]  # each machine has its folder
    assert fork_ranks(3, odd_one, odd, [ours] * 3) == fork_ranks(3, odd_one, odd, own) == codes
    assert fork_ranks(3, odd_one, odd, [{}] * 3) == [2] * 3, "nothing is saved yet"
    others = [{"data": "other"} if rank == odd else ours for rank in range(3)]
    assert fork_ranks(3, odd_one, odd, others) == [2] * 3, "two runs"


def test_gpus_that_a_person_names_and_that_are_not_there_are_told(monkeypatch, capsys):
    monkeypatch.setattr(worlds, "gpus", tuple)
    for named, told in (("0,2", True), ("", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible_devices(Options(), here()) == (torch.device("cpu"),)
        assert ("CUDA_VISIBLE_DEVICES is 0,2" in capsys.readouterr().err) is told
