"""The key-value store over which the ranks of one life find each other; empty at the start of a life."""
import contextlib
import fcntl
import json
import socket
import struct
import time
import uuid
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from common.errors import UserError
from common.place import Place, here, machine_id

ANSWER = timedelta(seconds=5)     # a store that is alive answers within
MEETING = timedelta(seconds=120)  # for all ranks to come; then this life fails, and the agents meet again
WORKING = timedelta(minutes=10)   # ranks that have met wait for one that loads, or longer while it moves
SIOCGIFADDR = 0x8915              # asks Linux for an interface's address


def fresh_store(rank: int, size: int) -> dist.TCPStore:
    """A key-value store that belongs to this life only.

    torchrun keeps ONE store for all restarts and gives it to every life without a prefix. So a new life can
    read the addresses of the dead one: connection refused, or a hang. Here rank 0 opens a store of its own.
    It tells each rank the port under a random name that this rank has just drawn: no old value can be there.
    """
    place = here()
    if not place.agent_store:
        return _open_store(place, place.port) if rank == 0 else _find_store(place.address, place.port)
    agent = dist.PrefixStore("life", _find_store(place.address, place.port))
    if rank == 0:
        store = _open_store(place, 0)
        _tell_the_port(agent, store, size)
    else:
        nonce = uuid.uuid4().hex
        agent.set(f"hello/{rank}", nonce)
        store = _find_store(place.address, int(agent.get(f"port/{nonce}")))
        store.add("joined", 1)
    return store


def _tell_the_port(agent, store, size):
    """Answers each nonce that a rank has drawn, until all have joined."""
    hellos = [f"hello/{rank}" for rank in range(1, size)]
    answered = set()
    deadline = time.monotonic() + MEETING.total_seconds()
    while store.add("joined", 0) < size - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{1 + store.add('joined', 0)} of {size} processes came within {MEETING}")
        # two requests a turn, however many ranks: none can begin before the last one has come
        if agent.check(hellos):
            for nonce in set(agent.multi_get(hellos)) - answered:
                agent.set(f"port/{nonce.decode()}", str(store.port))
                answered.add(nonce)
        time.sleep(0.01)


def _find_store(host, port):
    """Connects once the port listens: a TCPStore that comes too early tries again only after a second."""
    deadline = time.monotonic() + MEETING.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), ANSWER.total_seconds()).close()
            return dist.TCPStore(host, port, is_master=False, timeout=MEETING)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _open_store(place, port):
    """Bound to MASTER_ADDR alone: TCPStore by itself listens on every interface, without a password."""
    host = place.address
    family, address = _listening_address(host, port)
    loopback_name = address[0].startswith("127.") and host not in (address[0], "localhost")
    if loopback_name and place.size > place.local_size:  # Debian writes 127.0.1.1 into /etc/hosts
        raise UserError(f"MASTER_ADDR={host} is {address[0]} on this machine: others cannot reach it\n"
                        "give each torchrun --local_addr=ADDRESS, its address in the network")
    listener = socket.create_server(address, family=family, backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=MEETING,
                         master_listen_fd=listener.detach())


def _listening_address(host, port):
    """(family, address) of a name: IPv4, if it has both."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return family, address[:2]


def lifelines(store: dist.TCPStore, rank: int, size: int) -> list[socket.socket]:
    """Rank 0's connections to all, or this rank's to rank 0: the kernel ends them with either process."""
    if rank:
        port = int(store.get("lifelines"))
        return [socket.create_connection((store.host, port), ANSWER.total_seconds())]
    try:
        family, address = _listening_address(store.host, 0)
        listener = socket.create_server(address, family=family, backlog=size)
    except OSError:
        store.set("lifelines", "0")  # the others wait for it
        raise
    with listener:
        store.set("lifelines", str(listener.getsockname()[1]))
        listener.settimeout(6 * ANSWER.total_seconds())
        return [listener.accept()[0] for _ in range(size - 1)]


def choose_interface(place: Place, local_size: int, env: MutableMapping[str, str]) -> None:
    """Ranks of one machine use no network for gradients; between machines gloo takes the way to rank 0.

    By itself gloo listens where the machine's own name points: a loopback on Debian.
    """
    host = place.address
    loopback = host in ("localhost", "::1") or host.startswith("127.")
    if place.size == local_size and (loopback or host in (socket.gethostname(), socket.getfqdn())):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif place.size > local_size and "GLOO_SOCKET_IFNAME" not in env:
        interface = interface_towards(host)
        if interface:
            env["GLOO_SOCKET_IFNAME"] = interface


def interface_towards(host: str) -> str | None:
    """The name of the interface from which packets to `host` leave; None if it has no IPv4 address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect((host, 9))  # sends nothing
        address = socket.inet_aton(udp.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                if fcntl.ioctl(udp, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == address:
                    return name
    return None


# ---- what ranks say to each other over the store --------------------------------------------------
def gather(store: dist.TCPStore, rank: int, size: int, text: str) -> list[str]:
    """The text of every rank, on every rank; rank 0 reads them, the others ask it alone."""
    turn = store.add(f"turn/{rank}", 1)
    names = [f"texts/{turn}/{other}" for other in range(size)]
    store.set(names[rank], text)
    if rank == 0:
        wait(store, names)
        store.set(f"texts/{turn}", json.dumps([other.decode() for other in store.multi_get(names)]))
    wait(store, [f"texts/{turn}"])
    return json.loads(store.get(f"texts/{turn}"))


def find_place(store: dist.TCPStore, rank: int, size: int) -> tuple[int, int, int]:
    """(number of this machine, rank on it, ranks on it): a start by hand sets RANK and WORLD_SIZE alone."""
    machines = gather(store, rank, size, str(machine_id()))
    machine = machines[rank]
    ranks = [other for other in range(size) if machines[other] == machine]
    return list(dict.fromkeys(machines)).index(machine), ranks.index(rank), len(ranks)


def wait(store: dist.TCPStore, keys: list[str], patience: timedelta | None = None) -> None:
    """Waits for the keys, ten minutes, or longer while another process calls `progress`."""
    moves = 0
    while True:
        try:
            return store.wait(keys, patience or WORKING)
        except RuntimeError:
            newest = store.add("progress", 0)
            if newest == moves:
                raise
            moves = newest


def progress(store: dist.TCPStore | None) -> Callable[..., None]:
    """A function to call often during long work: the ranks that wait for this one then wait longer."""
    called = time.monotonic()

    def moved(*_: Any) -> None:
        nonlocal called
        if store and time.monotonic() - called > WORKING.total_seconds() / 50:
            called = time.monotonic()
            store.add("progress", 1)
    return moved
