"""What a world of several machines asks of each: whether it knows of them, and which network it uses."""

import fcntl
import socket
import struct
from contextlib import suppress

from common.errors import UserError
from common.place import this_process

SIOCGIFADDR = 0x8915  # asks Linux for an interface's address


def refuse_several_machines(store, rank, size):
    """Raise on all ranks if they are not on one machine, as they are taken to be without the variable."""
    store.set(f"machine/{rank}", str(this_process()["machine"]))
    machines = {*store.multi_get([f"machine/{other}" for other in range(size)])}
    if len(machines) > 1:
        raise UserError(
            f"LOCAL_WORLD_SIZE is not set, and the {size} ranks are on {len(machines)} machines\n"
            "set it, and LOCAL_RANK: how many ranks a machine has, and which of them this one is"
        )


def interface_towards(host):
    """Return the name of the interface from which packets to `host` leave; None if it has no IPv4 address."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect((host, 9))  # sends nothing
        address = socket.inet_aton(udp.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                if fcntl.ioctl(udp, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == address:
                    return name
    return None
