"""A network file system in user space: what NFS, Lustre and slow servers do.

    with served(folder, machines=2, late=3.0) as fs:    # skips the test if there is no FUSE
        one, other = fs.mounts                          # one store of files, as two machines see it
        fs.set(away=True)                               # any knob, at any time

Speaks the protocol of /dev/fuse itself (fuse.h of Linux, version 7.31): no library, no package. One process
serves all mounts. They share the files in `folder`/server.
"""

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

KNOBS = {
    "latency": 0.0,  # seconds, of each request
    "bandwidth": 0.0,  # bytes a second of all mounts together, to and fro; 0: no limit
    # Seconds that a mount believes what it knows: attributes, names, and that a name does not exist. An open
    # asks the server (NFS: close-to-open).
    "late": 0.0,
    "away": False,  # the server does not answer
}
NAMES = {  # nothing: a sync, a close
    1: "lookup",
    3: "getattr",
    4: "setattr",
    9: "mkdir",
    10: "unlink",
    11: "rmdir",
    12: "rename",
    14: "open",
    15: "read",
    16: "write",
    18: "release",
    20: "nothing",
    25: "nothing",
    27: "opendir",
    28: "readdir",
    30: "nothing",
    35: "create",
}
FORGET, READ, WRITE, INIT, INTERRUPT, BATCH_FORGET = 2, 15, 16, 26, 36, 42
SILENT = (FORGET, BATCH_FORGET, INTERRUPT)  # the kernel expects no answer
BIG_WRITES, AUTO_INVAL_DATA, MAX_PAGES = 1 << 5, 1 << 12, 1 << 22
DIRECT_IO = 1 << 0
NOTIFY_INVAL_INODE = 2
MODE, SIZE = 1 << 0, 1 << 3
MOST = 1 << 20  # bytes of a read or write
THREADS = 6  # of each mount: a slow request does not delay the others
LIBC = ctypes.CDLL(None, use_errno=True)


class Server:
    """What all mounts share: the files, the line to the server."""

    def __init__(self, folder, knobs):
        self.folder = str(folder)
        self.knobs = SimpleNamespace(**knobs)
        self.lock = threading.RLock()
        self.line = threading.Lock()
        self.back = threading.Event()
        self.turn(knobs)

    def turn(self, knobs):
        vars(self.knobs).update(knobs)
        (self.back.clear if self.knobs.away else self.back.set)()

    def cost(self, size):
        """Takes the time that a request takes."""
        self.back.wait()
        time.sleep(self.knobs.latency)
        if self.knobs.bandwidth:
            with self.line:
                time.sleep(size / self.knobs.bandwidth)


class Mount:
    """One machine's view: the kernel's caches are its own."""

    def __init__(self, server, device):
        self.server = server
        self.device = device
        self.knobs = server.knobs
        root = os.open(server.folder, os.O_PATH)
        self.nodes = {1: [root, 1]}  # inode: [descriptor, how often the kernel was told of it]

    def serve(self):
        while True:
            try:
                data = os.read(self.device, MOST + 4096)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return  # unmounted
            length, op, unique, node = struct.unpack_from("IIQQ", data)
            answer = b""
            number = 0
            try:
                answer = self._answer(op, node, data[40:length])
            except OSError as error:
                number = error.errno or errno.EIO
            except Exception as error:  # a mistake here must not leave the caller waiting for ever
                print(f"{NAMES.get(op, op)}: {error!r}", file=sys.stderr, flush=True)
                number = errno.EIO
            if op not in SILENT:
                text = b"" if number else answer or b""
                with contextlib.suppress(OSError):  # the caller was killed meanwhile
                    os.write(self.device, struct.pack("IiQ", 16 + len(text), -number, unique) + text)

    def _answer(self, op, node, data):
        if op == INIT:
            return self._init(data)
        if op in SILENT:
            return self._forget(op, node, data)
        if op not in NAMES:
            raise OSError(errno.ENOSYS, str(op))
        size = struct.unpack_from("QQI", data)[2] if op in (READ, WRITE) else 0
        self.server.cost(size)
        return getattr(self, f"_{NAMES[op]}")(node, data)

    # ---- names ------------------------------------------------------------------------------------
    def _init(self, data):
        major, minor, ahead, offered = struct.unpack_from("IIII", data)
        flags = BIG_WRITES | AUTO_INVAL_DATA | MAX_PAGES
        return struct.pack("IIIIHHIIHH32x", 7, 31, ahead, flags & offered, 16, 12, MOST, 1, MOST // 4096, 0)

    def _at(self, node):
        return self.nodes[node][0]

    def _entry(self, parent, name):
        """What the kernel is told of a name, which it may believe for `late` seconds."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._at(parent))
        with self.server.lock:
            number = os.fstat(fd).st_ino
            found = self.nodes.setdefault(number, [fd, 0])
            found[1] += 1
            if found[0] != fd:
                os.close(fd)
        return struct.pack("QQQQII", number, 0, *self._valid()) + self._attributes(number)

    def _valid(self):
        seconds, part = divmod(self.knobs.late, 1)
        return int(seconds), int(seconds), int(part * 1e9), int(part * 1e9)

    def _attributes(self, node):
        info = os.fstat(self._at(node))
        times = [divmod(ns, 10**9) for ns in (info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns)]
        return struct.pack(
            "QQQQQQIIIIIIIIII",
            node,
            info.st_size,
            info.st_blocks,
            *(t[0] for t in times),
            *(t[1] for t in times),
            info.st_mode,
            info.st_nlink,
            info.st_uid,
            info.st_gid,
            info.st_rdev,
            4096,
            0,
        )

    def _lookup(self, node, data):
        try:
            return self._entry(node, data[:-1])
        except FileNotFoundError:  # the kernel remembers this too
            return struct.pack("QQQQII", 0, 0, *self._valid()) + bytes(88)

    def _forget(self, op, node, data):
        told = []
        if op == FORGET:
            told = [(node, *struct.unpack_from("Q", data))]
        elif op == BATCH_FORGET:
            told = struct.iter_unpack("QQ", data[8:])
        for number, times in told:
            with self.server.lock:
                if number in self.nodes:
                    self.nodes[number][1] -= times
                    if self.nodes[number][1] <= 0 and number != 1:
                        os.close(self.nodes.pop(number)[0])

    def _getattr(self, node, data):
        valid, _, part, _ = self._valid()
        return struct.pack("QII", valid, part, 0) + self._attributes(node)

    def _setattr(self, node, data):
        what, size, mode = struct.unpack_from("I12xQ44xI", data)
        path = f"/proc/self/fd/{self._at(node)}"
        if what & SIZE:
            os.truncate(path, size)
        if what & MODE:
            os.chmod(path, stat.S_IMODE(mode))
        return self._getattr(node, data)

    def _mkdir(self, node, data):
        os.mkdir(data[8:-1], struct.unpack_from("I", data)[0], dir_fd=self._at(node))
        return self._entry(node, data[8:-1])

    def _unlink(self, node, data):
        os.unlink(data[:-1], dir_fd=self._at(node))

    def _rmdir(self, node, data):
        os.rmdir(data[:-1], dir_fd=self._at(node))

    def _rename(self, node, data):
        old, new, _ = data[8:].split(b"\0")
        to = struct.unpack_from("Q", data)[0]
        os.rename(old, new, src_dir_fd=self._at(node), dst_dir_fd=self._at(to))

    # ---- files -------------------------------------------------------------------------------------
    def _open(self, node, data):
        flags = struct.unpack_from("I", data)[0]
        descriptor = self._at(node)
        if os.fstat(descriptor).st_nlink == 0:  # the kernel looks the name up again, as NFS at each open
            raise OSError(errno.ESTALE, "open")
        self._notify(node, -1)
        done = os.O_NOFOLLOW | os.O_EXCL | os.O_CREAT
        return self._handle(os.open(f"/proc/self/fd/{descriptor}", flags & ~done), flags)

    def _handle(self, fd, flags):
        return struct.pack("QII", fd, DIRECT_IO if flags & os.O_APPEND else 0, 0)

    def _create(self, node, data):
        flags, mode = struct.unpack_from("II", data)
        fd = os.open(data[16:-1], flags | os.O_CREAT, mode, dir_fd=self._at(node))
        return self._entry(node, data[16:-1]) + self._handle(fd, flags)

    def _notify(self, node, start):
        """The kernel forgets the file's size and dates, and its bytes from `start` on (-1: not these)."""
        with contextlib.suppress(OSError):
            os.write(self.device, struct.pack("IiQQqq", 40, NOTIFY_INVAL_INODE, 0, node, start, -1))

    def _read(self, node, data):
        fd, at, size = struct.unpack_from("QQI", data)
        return os.pread(fd, size, at)

    def _write(self, node, data):
        fd, at, size, _, _, flags = struct.unpack_from("QQIIQI", data)
        os.pwrite(fd, data[40:], at)  # with O_APPEND at the end of the file, wherever `at` is
        if flags & os.O_APPEND:  # in a thread: it may wait for the answer to this write
            threading.Thread(target=self._notify, args=(node, 0)).start()
        return struct.pack("II", size, 0)

    def _nothing(self, node, data):
        """All that was written is at the server already."""

    def _release(self, node, data):
        os.close(struct.unpack_from("Q", data)[0])

    # ---- folders -----------------------------------------------------------------------------------
    def _opendir(self, node, data):
        return bytes(16)

    def _readdir(self, node, data):
        _, at, size = struct.unpack_from("QQI", data)
        text = b""
        names = sorted(os.listdir(f"/proc/self/fd/{self._at(node)}"))
        for k, name in enumerate([".", "..", *names][at:], at + 1):
            name = os.fsencode(name)
            line = struct.pack("QQII", k, k, len(name), 0) + name
            line += bytes(-len(line) % 8)
            if len(text) + len(line) > size:
                break
            text += line
        return text


def main(folder, knobs, *mounts):
    """Serves until its stdin ends; each line of it turns knobs."""
    server = Server(f"{folder}/server", json.loads(knobs))
    for path in mounts:
        mount = Mount(server, _mounted(path))
        for _ in range(THREADS):
            threading.Thread(target=mount.serve, daemon=True).start()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        with server.lock:
            server.turn(json.loads(line))
        print(json.dumps("done"), flush=True)
    os._exit(0)


def _mounted(path):
    """The descriptor over which the kernel asks."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if LIBC.mount(b"netfs", path.encode(), b"fuse.netfs", 6, options.encode()):  # nosuid, nodev
        raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")
    return device


@contextlib.contextmanager
def served(folder, machines=1, **knobs):
    """The mounts of one server, a process of its own; `set` turns knobs, `server` is the folder behind."""
    import pytest

    if os.geteuid() or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no file system in user space: it takes root and /dev/fuse")
    folder = Path(folder)
    unknown = set(knobs) - set(KNOBS)
    assert not unknown, unknown
    mounts = [folder / f"machine{k}" for k in range(machines)]
    for path in (folder / "server", *mounts):
        path.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, __file__, folder, json.dumps(KNOBS | knobs), *mounts],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def turn(**knobs):
        process.stdin.write(json.dumps(knobs) + "\n")
        process.stdin.flush()
        return process.stdout.readline()

    try:
        if not process.stdout.readline():
            pytest.skip("no file system in user space: this process may not mount one")
        yield SimpleNamespace(mounts=mounts, server=folder / "server", set=turn)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()
        for path in mounts:
            LIBC.umount2(str(path).encode(), 2)  # MNT_DETACH


if __name__ == "__main__":
    main(*sys.argv[1:])
