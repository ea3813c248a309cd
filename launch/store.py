"""A rendezvous store that outlives every agent: on one machine of the job, before the agents start,

    python launch/store.py HOST:PORT

and on each machine `torchrun --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT --rdzv_conf=is_host=0,...
--rdzv_id=NAME ...`. Without it the first agent hosts the store, and when that agent dies all the others end
a minute and a half later. It listens on HOST alone (a TCPStore by itself listens on every interface) but has
no password: HOST must be an address that only the job's own machines reach; see "Trust" in launch/README.md.
Port 0 takes a free port, which the printed line names.
"""

import os
import re
import signal
import socket
import sys
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from common.errors import ready_streams, say  # noqa: E402


def main(arguments):
    ready_streams()
    place = re.fullmatch(r"\[?(.+?)\]?:(\d+)", " ".join(arguments))
    if not place:
        say("usage: python launch/store.py HOST:PORT", sys.stderr)
        return 2
    host, port = place.groups()
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        if address[0].startswith("127.") and host not in (address[0], "localhost"):
            raise OSError(f"{host} is {address[0]} on this machine, where no other one reaches it")
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        say(
            f"error: {host}:{port}: {error}\n"
            "name this machine's address in the network (ip -brief address), and a free port",
            sys.stderr,
        )
        return 2
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # see SETTINGS of launch/torchrun.py
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signals = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup does
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before torch starts threads: they inherit it
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    say(f"store on {host}:{port}")
    signal.sigwait(signals)
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
