"""The key-value store over which the ranks of one life find each other; empty at the start of a life."""
import contextlib
import fcntl
import os
import pickle
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from common.errors import UserError, say
from common.options import agents_flag, machine_id

ANSWER = timedelta(seconds=5)     # a store that is alive answers within
JOINING = timedelta(minutes=10)   # ranks may still import, download or compile
GONE_SECONDS = 3.0                # a machine that leaves to meet again is in no list for a moment
SIOCGIFADDR = 0x8915              # asks Linux for an interface's address


def fresh_store(rank, size):
    """A key-value store that belongs to this life only.

    torchrun keeps ONE store for all restarts and gives it to every life without a prefix. So a new life can
    read the addresses of the dead one: connection refused, or a hang. Here rank 0 opens a store of its own.
    It tells each rank the port under a random name that this rank has just drawn: no old value can be there.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _open_store(host, port) if rank == 0 else _find_store(host, port)
    agent = dist.PrefixStore("life", _find_store(host, port))
    if rank:
        nonce = uuid.uuid4().hex
        agent.set(f"hello/{rank}", nonce)
        store = _find_store(host, int(agent.get(f"port/{nonce}")))
        store.add("joined", 1)
        return store
    store, hellos, answered = _open_store(host, 0), [f"hello/{other}" for other in range(1, size)], set()
    deadline = time.monotonic() + JOINING.total_seconds()
    while store.add("joined", 0) < size - 1:
        if time.monotonic() > deadline:
            arrived = 1 + sum(agent.check([hello]) for hello in hellos)
            raise TimeoutError(f"only {arrived} of {size} processes arrived within {JOINING}")
        # two requests a turn, however many ranks: none can begin before the last one has come
        for nonce in set(agent.multi_get(hellos)) - answered if agent.check(hellos) else ():
            agent.set(f"port/{nonce.decode()}", str(store.port))
            answered.add(nonce)
        time.sleep(0.01)
    return store


@contextlib.contextmanager
def while_machines_live() -> Iterator[None]:
    """Ends this rank if a machine dies before its ranks have come: then torchrun has the others meet again.

    Else this rank would wait for them for ten minutes. launch/torchrun.py sees such a death first.
    """
    place, machines = agents_flag("rdzv_endpoint"), int(os.environ.get("GROUP_WORLD_SIZE", 1))
    met = threading.Event()
    first = os.environ.get("LOCAL_RANK") == "0"  # its agent ends the others of this machine
    if first and machines > 1 and place and agents_flag("rdzv_backend") == "c10d":
        threading.Thread(target=_look_for, args=(machines, place, met), daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _look_for(machines, place, met):
    """Reads the agents' list of machines, from which they remove a dead one after 15 seconds."""
    if met.wait(ANSWER.total_seconds()):
        return
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    with contextlib.suppress(Exception):  # it does not answer: this rank waits as long as any
        conf = dict(pair.split("=", 1) for pair in (agents_flag("rdzv_conf") or "").split(",") if pair)
        job, gone = os.environ["TORCHELASTIC_RUN_ID"], None
        backend, _ = create_backend(RendezvousParameters("c10d", place, job, 1, 1, **conf | {"is_host": "0"}))
        while not met.wait(max(0.5, machines / 100)):  # a thousand machines would flood its store
            fewer = len(pickle.loads(backend.get_state()[0]).participants) < machines
            gone = (gone or time.monotonic()) if fewer else None
            if gone and time.monotonic() - gone >= GONE_SECONDS:
                say("a machine has gone before all could train, meeting again", sys.stderr)
                os._exit(1)


def place(store, rank, size):
    """(number of this machine, rank on it, ranks on it): a start by hand sets RANK and WORLD_SIZE alone."""
    store.set(f"place/{rank}", str(machine_id()))
    places = [store.get(f"place/{other}") for other in range(size)]
    if store.add("placed", 1) == size:
        store.set("all placed", "1")
    store.wait(["all placed"], JOINING)  # all have read: the store may close
    here = [other for other in range(size) if places[other] == places[rank]]
    return list(dict.fromkeys(places)).index(places[rank]), here.index(rank), len(here)


def choose_interface(env, size, local_size):
    """Ranks that meet at a loopback address are on one machine: they use no other interface for gradients.

    Between machines gloo listens where the machine's own name points. If that is a loopback (Debian writes
    127.0.1.1 into /etc/hosts), it takes the interface towards rank 0 instead.
    """
    host, name = env["MASTER_ADDR"], socket.gethostname()
    here = size == local_size and host in (name, socket.getfqdn())
    if here or host in ("localhost", "::1") or host.startswith("127."):
        loopback = "lo" if sys.platform == "linux" else "lo0"
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)
        env.setdefault("NCCL_SOCKET_IFNAME", loopback)
    elif size > local_size and "GLOO_SOCKET_IFNAME" not in env:
        with contextlib.suppress(OSError):
            if socket.gethostbyname(name).startswith("127.") and (found := interface_towards(host)):
                env["GLOO_SOCKET_IFNAME"] = found


def interface_towards(host):
    """The name of the interface from which packets to `host` leave; None if it has no IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                if fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    return name


def lifelines(store: Any, rank: int, size: int) -> list[socket.socket]:
    """Rank 0's connections to all, or this rank's to rank 0: the kernel ends them with either process."""
    if rank:
        return [socket.create_connection((store.host, int(store.get("lifelines"))), ANSWER.total_seconds())]
    try:
        family, address = _own_address(store.host, 0)
        listener = socket.create_server(address, family=family, backlog=size)
    except OSError:
        store.set("lifelines", "0")  # nobody waits for it
        raise
    with listener:
        store.set("lifelines", str(listener.getsockname()[1]))
        listener.settimeout(6 * ANSWER.total_seconds())
        return [listener.accept()[0] for _ in range(size - 1)]


def wait(store, key, patience=None):
    """Waits for the key: ten minutes, or longer while another process calls `progress`."""
    seen = 0
    while True:
        try:
            return store.wait([key], patience or JOINING)
        except RuntimeError:
            if (moves := store.add("progress", 0)) == seen:
                raise
            seen = moves


def progress(store: Any) -> Callable[..., None]:
    """A function to call often during long work: the ranks that wait for this one then wait longer."""
    told = time.monotonic()

    def moved(*_):
        nonlocal told
        if store and time.monotonic() - told > JOINING.total_seconds() / 50:
            told = time.monotonic()
            store.add("progress", 1)
    return moved


def _find_store(host, port):
    """Connects once the port listens: a TCPStore that comes too early tries again only after a second."""
    deadline = time.monotonic() + JOINING.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), ANSWER.total_seconds()).close()
            return dist.TCPStore(host, port, is_master=False, timeout=JOINING)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _open_store(host, port):
    """Bound to MASTER_ADDR alone: TCPStore by itself listens on every interface, without a password."""
    family, address = _own_address(host, port)
    _reachable(host, address[0])
    try:
        listener = socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the agent will choose another port
            raise
        where = f"MASTER_ADDR={host} MASTER_PORT={port}"
        raise UserError(f"{where}: rank 0 cannot listen there ({error.strerror})\n"
                        "choose a free port, and an address of rank 0's own machine") from error
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=JOINING,
                         master_listen_fd=listener.detach())


def _own_address(host, port):
    """(family, address) to listen at: IPv4, if the host has both."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return family, address[:2]


def _reachable(host, address):
    """UserError if other machines need a name that is a loopback here; warns if ranks are started by hand."""
    if not address.startswith("127.") or host in (address, "localhost"):
        return
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if here is None:
        say(f"{host} is {address} on this machine: ranks on other machines cannot connect to it", sys.stderr)
    elif here != os.environ.get("WORLD_SIZE"):
        raise UserError(f"MASTER_ADDR={host} is {address} on this machine: others cannot reach rank 0 there\n"
                        "give each torchrun --local_addr=ADDRESS, its address in the network "
                        "(ip -brief address)")
