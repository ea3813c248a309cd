"""The key-value store over which the ranks of one life find each other; nothing of an earlier life can be
read from it.
"""
import contextlib
import fcntl
import os
import socket
import struct
import sys
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from common.errors import UserError, say
from common.options import machine

ANSWER = timedelta(seconds=5)     # of a store that is alive
GET_ADDRESS = 0x8915              # SIOCGIFADDR
JOINING = timedelta(minutes=10)   # ranks may still be importing, downloading or compiling


def fresh_store(rank, size):
    """A key-value store that belongs to this life only.

    torchrun keeps ONE store for all restarts and gives it to every life without a prefix, so a new life can
    read the addresses its dead predecessor left there: connection refused, or a hang. Here rank 0 opens a
    store of its own and hands its port to each rank under a nonce that this very process drew: nothing stale
    can be read.
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
    store = _open_store(host, 0)
    deadline, answered = time.monotonic() + JOINING.total_seconds(), {}
    while store.add("joined", 0) < size - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {store.add('joined', 0) + 1} of {size} processes arrived within {JOINING}")
        for other in range(1, size):
            if agent.check([f"hello/{other}"]) and answered.get(other) != (nonce := agent.get(f"hello/{other}")):
                agent.set(f"port/{nonce.decode()}", str(store.port))
                answered[other] = nonce
        time.sleep(0.01)
    return store


def place(store, rank, size):
    """(number of this machine, rank on it, ranks on it), found by asking: a person sets RANK and WORLD_SIZE
    alone.
    """
    store.set(f"place/{rank}", machine())
    places = [store.get(f"place/{other}") for other in range(size)]
    if store.add("placed", 1) == size:
        store.set("all placed", "1")
    store.wait(["all placed"], JOINING)  # all have read: who holds the store may leave
    here = [other for other in range(size) if places[other] == places[rank]]
    return list(dict.fromkeys(places)).index(places[rank]), here.index(rank), len(here)


def choose_interface(env, size, local_size):
    """Who meets at a loopback address is on one machine, and offers gradients on no other interface.

    Between machines gloo offers what the machine's own name stands for: where that is a loopback (Debian
    writes 127.0.1.1 into /etc/hosts), the interface on the way to rank 0 it is.
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
    """The name of the interface whose address packets to `host` would come from; None if it has none in IPv4.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                if fcntl.ioctl(probe, GET_ADDRESS, struct.pack("256s", name.encode()))[20:24] == own:
                    return name


def wait(store, key, patience=None):
    """Until the key is there: ten minutes, or as long as somebody's `progress` is called."""
    seen = 0
    while True:
        try:
            return store.wait([key], patience or JOINING)
        except RuntimeError:
            if (moves := store.add("progress", 0)) == seen:
                raise
            seen = moves


def progress(store):
    """A hook to be called during long work of this thread: those who wait for it know that it moves."""
    told = time.monotonic()

    def moved(*_):
        nonlocal told
        if store and time.monotonic() - told > JOINING.total_seconds() / 50:
            told = time.monotonic()
            store.add("progress", 1)
    return moved


def _find_store(host, port):
    """Knocks until somebody listens: a TCPStore that comes too early waits up to a second before it tries
    again.
    """
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
    families = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), key=lambda info: info[0] != socket.AF_INET)
    _reachable(host, families[0][4][0])
    try:
        listener = socket.create_server(families[0][4][:2], family=families[0][0], backlog=1024)
    except OSError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the agent chose it a moment ago: it will choose another
            raise
        raise UserError(f"MASTER_ADDR={host} MASTER_PORT={port}: rank 0 cannot listen there ({error.strerror})\n"
                        "choose a free port, and an address of rank 0's own machine") from error
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=JOINING,
                         master_listen_fd=listener.detach())


def _reachable(host, address):
    """Raises UserError if ranks of other machines are to come to a name that is a loopback here; by hand they
    may all be here.
    """
    if not address.startswith("127.") or host in (address, "localhost"):
        return
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if here is None:
        say(f"{host} is {address} on this machine: ranks on other machines cannot come there", sys.stderr)
    elif here != os.environ.get("WORLD_SIZE"):
        raise UserError(f"MASTER_ADDR={host} is {address} on this machine, where no other one reaches rank 0\n"
                        "give each torchrun --local_addr=ADDRESS, its machine's address in the network (ip -brief address)")
