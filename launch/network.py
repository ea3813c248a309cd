"""What the doctor looks at between machines: names, addresses, ports, and whether all machines are alike."""
import contextlib
import fcntl
import json
import os
import socket
import threading
import time

from common.errors import UserError

RESOLVE_SECONDS = CONNECT_SECONDS = 3
MEET_SECONDS = 30
ANSWER_SECONDS = 5
CLOCK_SECONDS = 2        # agents call a machine dead whose clock is 6 s behind
LONGEST_BYTES = 1 << 16


def address(job):
    """Where the other machines meet must not be this machine's loopback."""
    if not job.place:
        if job.file and os.path.isdir(os.path.dirname(job.file) or "."):
            return f"the machines meet in the file {job.file}"
        raise UserError(f"{job.high} machines, but no place where they meet\n"
                        "--rdzv_endpoint=HOST:PORT, an address of one of them, or a file that all see")
    host = job.place[0]
    found = resolve(host)
    if found.startswith("127.") or found == "::1":
        raise UserError(f"{host} is {found} here, where no other machine reaches it\n"
                        "the address of that machine in the network (ip -brief address)")
    job.place = found, job.place[1]
    own = own_address(job.place)
    return f"{own} towards {host}" + (f" ({found})" if found != host else "")


def name(job):
    """Agents tell each other their names, or addresses where a name is a loopback; both ways must be fast."""
    own, began = socket.gethostname(), time.monotonic()
    found = resolve(own)
    with contextlib.suppress(OSError):
        back = within(RESOLVE_SECONDS, lambda: socket.gethostbyaddr(found)[0])
        found += f", and back {back}"
    if (seconds := time.monotonic() - began) > RESOLVE_SECONDS / 2:
        raise UserError(f"the name service took {seconds:.1f} s for {own}, at every start\n"
                        "add this machine to its /etc/hosts, or mend the name service")
    if found.startswith("127.") and not job.place:
        raise UserError(f"{own} is {found} here, which other machines cannot reach\n--local_addr=ADDRESS")
    return f"{own} is {found}"


def port(job):
    """The rendezvous answers, or its port is free on this machine."""
    if not job.place:
        return "none is needed"
    try:
        socket.create_connection(job.place, timeout=CONNECT_SECONDS).close()
        return f"{job.place[0]}:{job.place[1]} answers"
    except ConnectionRefusedError:
        if is_own(job.place[0]):
            return f"{job.place[1]} is free on this machine"
        if not job.hosted:
            return f"{job.place[0]} is reached, the first agent will listen at {job.place[1]}"
        raise UserError(f"nothing listens at {job.place[0]}:{job.place[1]}\n"
                        f"there: python launch/store.py {job.place[0]}:{job.place[1]}") from None
    except OSError as error:
        raise UserError(f"{job.place[0]}:{job.place[1]} is not reached ({error})\n"
                        "is the address right? does a firewall stand between?") from None


def machines(job):
    """All that start within half a minute compare what must be alike."""
    return compare(job) if job.place else "the first agents will tell"


def compare(job):
    """The line to print if all that came are alike; else a UserError names a machine and its value."""
    place = job.place[0], job.place[1] + (1 if job.place[1] < 65535 else -1)
    theirs = meet(place, job, time.monotonic() + MEET_SECONDS)
    if len(theirs) < max(2, job.low):
        raise UserError(f"{len(theirs)} of {job.low} to {job.high} machines came within {MEET_SECONDS} s\n"
                        "start the doctor on all machines at about the same time")
    first = theirs[0]
    for other in theirs[1:]:
        if abs(other["clock"]) > CLOCK_SECONDS:
            raise UserError(f"the clock of {other['name']} is {other['clock']:+.1f} s "
                            f"against {first['name']}\n"
                            "let a time service set it (chrony, systemd-timesyncd)")
        if other["lock"]:
            raise UserError(f"{other['name']} gets a lock in the run folder that {first['name']} holds\n"
                            "mount it with locks (NFS: not nolock), or a folder of its own for each machine")
        for key in first["facts"] | other["facts"]:
            values = [one["facts"].get(key) for one in (first, other)]
            if values[0] != values[1]:
                raise UserError(f"{key} is {values[0]} on {first['name']}, {values[1]} on {other['name']}\n"
                                "give every machine the same code, environment, data and options")
    sees = sum(other["sees"] for other in theirs[1:])
    folder = {0: "each has a run folder of its own", len(theirs) - 1: "one run folder for all"}
    return f"{len(theirs)} are alike; {folder.get(sees, 'some share the run folder')}"


def meet(place, job, end):
    """What every machine says of itself; the machine at the meeting place comes first."""
    problem = None
    while not problem or time.monotonic() < end:
        try:
            server = socket.create_server(place)
        except OSError:  # it is another machine's address, or another doctor's on this one
            pass
        else:
            with server:
                return host(server, job, end)
        try:
            with socket.create_connection(place, timeout=ANSWER_SECONDS) as link:
                return visit(link, job, end)
        except (OSError, ValueError) as error:
            problem = error
        time.sleep(0.1)
    raise UserError(f"no doctor answers at {place[0]}:{place[1]} ({problem})\n"
                    "start it on that machine at about the same time; does a firewall stand between?")


def host(server, job, end):
    """Greets all that come with the time and a lock that this machine holds; then tells all what all said."""
    said, links = [about(job)], []
    with open(job.folder / "shared", "wb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            while len(said) < job.high and (left := end - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    link, _ = server.accept()
                except TimeoutError:
                    break
                link.settimeout(ANSWER_SECONDS)
                try:
                    send(link, {"time": time.time(), "path": str((job.folder / "shared").absolute())})
                    said.append(receive(link))
                    links.append(link)
                except (OSError, ValueError):  # no doctor
                    link.close()
        finally:
            for link in links:
                with link, contextlib.suppress(OSError):
                    send(link, said)
    return said


def visit(link, job, end):
    greeting = receive(link)
    clock = time.time() - greeting["time"]
    sees = os.path.exists(greeting["path"])
    send(link, about(job) | {"clock": clock, "sees": sees, "lock": sees and gets_lock(greeting["path"])})
    link.settimeout(max(1, end - time.monotonic() + ANSWER_SECONDS))
    return receive(link)


def about(job):
    return {"name": socket.gethostname(), "facts": job.facts, "clock": 0, "sees": True, "lock": False}


def send(link, what):
    link.sendall(json.dumps(what).encode() + b"\n")


def receive(link):
    with link.makefile("rb") as stream:
        line = stream.readline(LONGEST_BYTES)
    if not line.endswith(b"\n"):
        raise OSError("the other doctor has left")
    return json.loads(line)


def gets_lock(path):
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def resolve(host):
    try:
        return within(RESOLVE_SECONDS, lambda: socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise UserError(f"{host} cannot be resolved ({error.strerror or error})\n"
                        "an address instead of a name; in Kubernetes a name may need some seconds") from None


def within(seconds, find):
    """What `find` returns; the name service itself has no time-out."""
    answer = []

    def look():
        try:
            answer.append((find(), None))
        except OSError as error:
            answer.append((None, error))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    found, error = answer[0] if answer else (None, TimeoutError(f"no answer in {seconds} s"))
    if error:
        raise error
    return found


def own_address(place):
    with socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return probe.getsockname()[0]


def is_own(host):
    with contextlib.suppress(OSError), socket.create_server((host, 0)):
        return True
    return False
