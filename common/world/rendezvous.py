"""The key-value store over which the ranks of one life find each other; empty at the start of a life."""

import functools
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from common.errors import UserError
from common.place import here

ANSWER = timedelta(seconds=5)  # a process that is alive answers within
MEETING = timedelta(seconds=120)  # for all ranks to come; then this life fails, and the agents meet again
SILENT_SECONDS = 20  # then a machine without power, or behind a cut cable, has gone


def fresh_store(rank, size):
    """A key-value store that belongs to this life only.

    torchrun keeps ONE store for all restarts and gives it to every life without a prefix. So a new life can
    read the addresses of the dead one: connection refused, or a hang. Here rank 0 opens a store of its own.
    It tells the port there until all have joined. So a port that another life finds is that of a rank 0 which
    has died before: nobody listens, and it is read again.
    """
    place = here()
    if not place.agent_store:
        first = _first_store(place.address, place.port, rank)
        # a script's second loop (k folds, say) finds no word of the first one
        return dist.PrefixStore(str(first.add(f"loops/{rank}", 1)), first)
    agent = dist.PrefixStore("life", _find_store(place.address, lambda: place.port))
    if rank:
        store = _find_store(place.address, lambda: int(agent.get("port")))
        store.set(f"joined/{rank}", "")
    else:
        store = _open_store(place.address, 0)
        agent.set("port", str(store.port))
        store.wait([f"joined/{other}" for other in range(1, size)], MEETING)
        agent.delete_key("port")
    return store


@functools.cache
def _first_store(host, port, rank):
    return _find_store(host, lambda: port) if rank else _open_store(host, port)


def _find_store(host, port_now):
    """Connects once the port listens: a TCPStore that comes too early tries again only after a second."""
    deadline = time.monotonic() + MEETING.total_seconds()
    while True:
        port = port_now()
        try:
            socket.create_connection((host, port), ANSWER.total_seconds()).close()
            return dist.TCPStore(host, port, is_master=False, timeout=MEETING)
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
        timeout=MEETING,
        master_listen_fd=listener.detach(),
    )


def _listen(host, port):
    """A socket on this address alone: TCPStore by itself listens on every interface, without a password."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family, backlog=1024)


def lifelines(store: dist.Store, rank: int, size: int) -> list[socket.socket]:
    """Rank 0's connections to all, or this rank's to rank 0: the kernel ends them with either process.

    It also ends them when the other machine is silent. A stopped process is not: its kernel answers.
    """
    host = here().address
    if rank:
        return [_felt(socket.create_connection((host, int(store.get("lifelines")))))]
    with _felt(_listen(host, 0)) as listener:  # accepted connections inherit it
        store.set("lifelines", str(listener.getsockname()[1]))
        listener.settimeout(MEETING.total_seconds())
        return [listener.accept()[0] for _ in range(size - 1)]


def _felt(line):
    """Keepalive: the kernel ends a connection whose other side is silent."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        line.setsockopt(socket.IPPROTO_TCP, option, SILENT_SECONDS // 4)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
    return line
