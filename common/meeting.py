"""The key-value store over which the ranks of one life find each other; nothing of an earlier life can be read from it."""
import os
import socket
import sys
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from common import UserError
from common.processes import machine

ANSWER = timedelta(seconds=5)     # of a store that is alive
JOINING = timedelta(minutes=10)   # ranks may still be importing, downloading or compiling


def fresh_store(rank, size):
    """A key-value store that belongs to this life only.

    torchrun keeps ONE store for all restarts and gives it to every life without a prefix, so a new life can read the
    addresses its dead predecessor left there: connection refused, or a hang. Here rank 0 opens a store of its own and
    hands its port to each rank under a nonce that this very process drew: nothing stale can be read.
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
    """(number of this machine, rank on it, ranks on it), found by asking: a person sets RANK and WORLD_SIZE alone."""
    store.set(f"place/{rank}", machine())
    places = [store.get(f"place/{other}") for other in range(size)]
    if store.add("placed", 1) == size:
        store.set("all placed", "1")
    store.wait(["all placed"], JOINING)                             # all have read: who holds the store may leave
    here = [other for other in range(size) if places[other] == places[rank]]
    return list(dict.fromkeys(places)).index(places[rank]), here.index(rank), len(here)


def keep_to_loopback_on_one_machine(env, size, local_size):
    """Whoever meets at a loopback address is on one machine: then gradients need not be offered on its other interfaces."""
    host = env["MASTER_ADDR"]
    here = size == local_size and host in (socket.gethostname(), socket.getfqdn())
    if here or host in ("localhost", "::1") or host.startswith("127."):
        name = "lo" if sys.platform == "linux" else "lo0"
        env.setdefault("GLOO_SOCKET_IFNAME", name)
        env.setdefault("NCCL_SOCKET_IFNAME", name)


def wait(store, key):
    """Until the key is there: ten minutes, or as long as somebody's `progress` is called."""
    seen = 0
    while True:
        try:
            return store.wait([key], JOINING)
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
    """Knocks until somebody listens: a TCPStore that comes too early waits up to a second before it tries again."""
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
    try:
        listener = socket.create_server(families[0][4][:2], family=families[0][0], backlog=1024)
    except OSError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ:                     # the agent chose it a moment ago: it will choose another
            raise
        raise UserError(f"MASTER_ADDR={host} MASTER_PORT={port}: rank 0 cannot listen there ({error.strerror})\n"
                        "choose a free port, and an address of rank 0's own machine") from error
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=JOINING,
                         master_listen_fd=listener.detach())
