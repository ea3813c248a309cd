"""The key-value store over which the ranks of one life find each other; empty at the start of a life."""

import functools
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from common.errors import UserError
from common.place import here

ANSWER = timedelta(seconds=5)  # a process that is alive answers within
MEETING_TIME = timedelta(seconds=120)  # for all ranks to come; else this life fails, and agents meet again
SILENT_SECONDS = 20  # then a machine without power, or behind a cut cable, has gone


def fresh_store(rank, size):
    """Open a key-value store that belongs to this life only.

    torchrun keeps ONE store for all restarts and gives it to every life without a prefix. So a new life can
    read the addresses of the dead one: connection refused, or a hang. Here rank 0 opens a store of its own.
    It tells each rank the port under a random name that this rank has just drawn: no old value can be there.
    """
    place = here()
    if not place.agent_store:
        return _store_of_this_process(place, rank)
    agent = dist.PrefixStore("life", _find_store(place.address, place.port))
    if rank == 0:
        store = _open_store(place.address, 0)
        _tell_the_port(agent, store, size)
    else:
        nonce = uuid.uuid4().hex
        agent.set(f"hello/{rank}", nonce)
        store = _find_store(place.address, int(agent.get(f"port/{nonce}")))
        store.add("joined", 1)
    return store


def _store_of_this_process(place, rank):
    """Open it at the given address; a second loop (k folds, say) has one of its own, told over the first."""
    first = _first_store(place.address, place.port, rank)
    number = first.add(f"loops/{rank}", 1)  # as many on every rank
    if number == 1:
        return first
    if rank:
        return _find_store(place.address, int(first.get(f"port/{number}")))
    store = _open_store(place.address, 0)
    first.set(f"port/{number}", str(store.port))
    return store


@functools.cache
def _first_store(host, port, rank):
    return _find_store(host, port) if rank else _open_store(host, port)


def _tell_the_port(agent, store, size):
    """Answer each nonce that a rank has drawn, until all have joined."""
    hellos = [f"hello/{rank}" for rank in range(1, size)]
    deadline = time.monotonic() + MEETING_TIME.total_seconds()
    while store.add("joined", 0) < size - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{1 + store.add('joined', 0)} of {size} processes came within {MEETING_TIME}")
        # three requests to the agent a turn, however many ranks: none can begin before the last one has come
        if agent.check(hellos):
            answers = [f"port/{nonce.decode()}" for nonce in agent.multi_get(hellos)]
            agent.multi_set(answers, [str(store.port)] * len(answers))
        time.sleep(0.01)


def _find_store(host, port):
    """Connect once the port listens: a TCPStore that comes too early tries again only after a second."""
    deadline = time.monotonic() + MEETING_TIME.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), ANSWER.total_seconds()).close()
            return dist.TCPStore(host, port, is_master=False, timeout=MEETING_TIME)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _open_store(host, port):
    place = here()
    listener = _listen(host, port)
    address, port, *_ = listener.getsockname()
    if address.startswith("127.") and host not in (address, "localhost") and place.size > place.local_size:
        raise UserError(
            f"MASTER_ADDR={host} is {address} on this machine: others cannot reach it\n"
            "give each torchrun --local_addr=ADDRESS, its address in the network"
        )
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=MEETING_TIME,
        master_listen_fd=listener.detach(),
    )


def _listen(host, port):
    """Listen on this address alone: TCPStore by itself does on every interface, without a password."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family, backlog=1024)


def lifelines(store: dist.TCPStore, rank: int, size: int) -> list[socket.socket]:
    """Connect rank 0 to all, or this rank to rank 0: the kernel ends a connection with either process.

    It also ends them when the other machine is silent. A stopped process is not: its kernel answers.
    """
    if rank:
        port, nonce = store.get("lifelines").decode().split()
        line = _felt(socket.create_connection((store.host, int(port))))
        line.sendall(nonce.encode())
        return [line]
    nonce = uuid.uuid4().hex
    lines: list[socket.socket] = []
    with _felt(_listen(store.host, 0)) as listener:  # accepted connections inherit it
        store.set("lifelines", f"{listener.getsockname()[1]} {nonce}")
        listener.settimeout(MEETING_TIME.total_seconds())
        while len(lines) < size - 1:
            line, _ = listener.accept()
            if _knows(line, nonce):
                lines.append(line)
            else:  # no rank of ours: another user's, say
                line.close()
    return lines


def _knows(line, nonce):
    """Return whether these are the first words of a new connection."""
    line.settimeout(ANSWER.total_seconds())
    with suppress(OSError):
        if line.recv(len(nonce)) == nonce.encode():
            line.settimeout(None)
            return True
    return False


def _felt(line):
    """Set keepalive: the kernel ends a connection whose other side is silent."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        line.setsockopt(socket.IPPROTO_TCP, option, SILENT_SECONDS // 4)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
    return line
