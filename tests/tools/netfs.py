"""A network file system in user space: what NFS, Lustre and slow servers do.

    with served(folder, machines=2, late=3) as fs:      # skips the test if there is no FUSE
        one, other = fs.mounts                          # one store of files, as two machines see it
        fs.set(away=True)                               # any knob, at any time

Speaks the protocol of /dev/fuse itself (fuse.h of Linux, version 7.31): no library, no package. One process
serves all mounts. They share the files in `folder`/server.
"""

import contextlib
import ctypes
import errno
import multiprocessing
import os
import stat
import struct
import threading
import time
from types import SimpleNamespace

import pytest

SERVED = {  # what is not here succeeds without an answer (a sync, a close), or is not known
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
    26: "init",
    27: "opendir",
    28: "readdir",
    35: "create",
}
SILENT = (2, 36, 42)  # the kernel forgets, or interrupts, and expects no answer
BIG_WRITES, AUTO_INVAL_DATA, MAX_PAGES = 1 << 5, 1 << 12, 1 << 22
DIRECT_IO = 1 << 0
NOTIFY_INVAL_INODE = 2
MODE, SIZE = 1 << 0, 1 << 3
MOST = 1 << 20  # bytes of a read or write
THREADS = 6  # of each mount: a slow request does not delay the others
LIBC = ctypes.CDLL(None, use_errno=True)


class Mount:
    """One machine's view: the kernel's caches are its own."""

    def __init__(self, folder, path, knobs):
        self.knobs = knobs
        self.nodes = {1: os.open(folder, os.O_PATH)}  # inode: a descriptor, kept as long as the mount is
        self.device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        if LIBC.mount(b"netfs", os.fsencode(path), b"fuse.netfs", 6, options.encode()):  # nosuid, nodev
            raise OSError(ctypes.get_errno(), "mount")
        for _ in range(THREADS):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            with contextlib.suppress(OSError):  # the caller was killed meanwhile
                data = os.read(self.device, MOST + 4096)
                length, operation, unique, node = struct.unpack_from("IIQQ", data)
                if operation not in SILENT:
                    number, text = self._answer(operation, node, data[40:length])
                    os.write(self.device, struct.pack("IiQ", 16 + len(text), -number, unique) + text)

    def _answer(self, operation, node, data):
        """(error number, the answer); a mistake here must not leave the caller waiting for ever."""
        if operation not in SERVED:
            return errno.ENOSYS, b""
        self.knobs.back.wait()
        time.sleep(self.knobs.latency)
        try:
            return 0, getattr(self, f"_{SERVED[operation]}")(node, data) or b""
        except Exception as error:
            return getattr(error, "errno", errno.EIO), b""

    # ---- names ------------------------------------------------------------------------------------
    def _init(self, node, data):
        ahead, offered = struct.unpack_from("8xII", data)
        flags = BIG_WRITES | AUTO_INVAL_DATA | MAX_PAGES
        return struct.pack("IIIIHHIIHH32x", 7, 31, ahead, flags & offered, 16, 12, MOST, 1, MOST // 4096, 0)

    def _entry(self, parent, name):
        """What the kernel is told of a name, which it may believe for `late` seconds."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.nodes[parent])
        number = os.fstat(fd).st_ino
        if self.nodes.setdefault(number, fd) != fd:
            os.close(fd)
        return self._named(number) + self._attributes(number)

    def _named(self, number):
        return struct.pack("4Q8x", number, 0, self.knobs.late, self.knobs.late)

    def _attributes(self, node):
        info = os.fstat(self.nodes[node])
        seconds, rest = divmod(info.st_mtime_ns, 10**9)
        sizes = (info.st_size, info.st_blocks)
        return struct.pack("6Q5I20x", node, *sizes, *[seconds] * 3, *[rest] * 3, info.st_mode, info.st_nlink)

    def _lookup(self, node, data):
        try:
            return self._entry(node, data[:-1])
        except FileNotFoundError:  # the kernel remembers this too
            return self._named(0) + bytes(88)

    def _getattr(self, node, data):
        return struct.pack("Q8x", self.knobs.late) + self._attributes(node)

    def _setattr(self, node, data):
        what, size, mode = struct.unpack_from("I12xQ44xI", data)
        path = f"/proc/self/fd/{self.nodes[node]}"
        if what & SIZE:
            os.truncate(path, size)
        if what & MODE:
            os.chmod(path, stat.S_IMODE(mode))
        return self._getattr(node, data)

    def _mkdir(self, node, data):
        os.mkdir(data[8:-1], struct.unpack_from("I", data)[0], dir_fd=self.nodes[node])
        return self._entry(node, data[8:-1])

    def _unlink(self, node, data):
        os.unlink(data[:-1], dir_fd=self.nodes[node])

    def _rmdir(self, node, data):
        os.rmdir(data[:-1], dir_fd=self.nodes[node])

    def _rename(self, node, data):
        old, new, _ = data[8:].split(b"\0")
        to = struct.unpack_from("Q", data)[0]
        os.rename(old, new, src_dir_fd=self.nodes[node], dst_dir_fd=self.nodes[to])

    # ---- files -------------------------------------------------------------------------------------
    def _open(self, node, data):
        flags = struct.unpack_from("I", data)[0]
        descriptor = self.nodes[node]
        if os.fstat(descriptor).st_nlink == 0:  # the kernel looks the name up again, as NFS at each open
            raise OSError(errno.ESTALE, "open")
        with contextlib.suppress(OSError):  # the kernel forgets the file's size and dates
            os.write(self.device, struct.pack("IiQQqq", 40, NOTIFY_INVAL_INODE, 0, node, -1, -1))
        done = os.O_NOFOLLOW | os.O_EXCL | os.O_CREAT
        return self._handle(os.open(f"/proc/self/fd/{descriptor}", flags & ~done), flags)

    def _handle(self, fd, flags):
        return struct.pack("QII", fd, DIRECT_IO if flags & os.O_APPEND else 0, 0)

    def _create(self, node, data):
        flags, mode = struct.unpack_from("II", data)
        fd = os.open(data[16:-1], flags | os.O_CREAT, mode, dir_fd=self.nodes[node])
        return self._entry(node, data[16:-1]) + self._handle(fd, flags)

    def _read(self, node, data):
        fd, at, size = struct.unpack_from("QQI", data)
        return os.pread(fd, size, at)

    def _write(self, node, data):
        fd, at, size = struct.unpack_from("QQI", data)
        os.pwrite(fd, data[40:], at)  # with O_APPEND at the end of the file, wherever `at` is
        return struct.pack("II", size, 0)

    def _release(self, node, data):
        os.close(struct.unpack_from("Q", data)[0])

    # ---- folders -----------------------------------------------------------------------------------
    def _opendir(self, node, data):
        return bytes(16)

    def _readdir(self, node, data):
        _, at, size = struct.unpack_from("QQI", data)
        text = b""
        names = sorted(os.listdir(f"/proc/self/fd/{self.nodes[node]}"))
        for k, name in enumerate([".", "..", *names][at:], at + 1):
            name = os.fsencode(name)
            line = struct.pack("QQII", k, k, len(name), 0) + name
            line += bytes(-len(line) % 8)
            if len(text) + len(line) > size:
                break
            text += line
        return text


def serve(server, mounts, turns):
    """What comes through the pipe turns knobs, which all mounts share.

    `latency`: seconds, of each request. `away`: the server does not answer. `late`: whole seconds that a
    mount believes what it knows: attributes, names, and that a name does not exist. An open asks the server
    (NFS: close-to-open).
    """
    knobs = SimpleNamespace(latency=0.0, late=0, back=threading.Event())
    for path in mounts:
        Mount(server, path, knobs)
    while True:
        turned = turns.recv()
        (knobs.back.clear if turned.pop("away", False) else knobs.back.set)()
        vars(knobs).update(turned)
        turns.send("turned")


@contextlib.contextmanager
def served(folder, machines=1, **knobs):
    """The mounts of one server, a process of its own; `set` turns knobs, `server` is the folder behind."""
    if os.geteuid() or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no file system in user space: it takes root and /dev/fuse")
    server = folder / "server"
    mounts = [folder / f"machine{number}" for number in range(machines)]
    for path in (server, *mounts):
        path.mkdir(parents=True, exist_ok=True)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(server, mounts, theirs))
    process.start()
    theirs.close()

    def turn(**knobs):
        ours.send(knobs)
        return ours.recv()

    try:
        turn(**knobs)
        yield SimpleNamespace(mounts=mounts, server=server, set=turn)
    except EOFError:
        pytest.skip("no file system in user space: this process may not mount one")
    finally:
        process.kill()
        process.join()
        ours.close()
        for path in mounts:
            LIBC.umount2(os.fsencode(path), 2)  # MNT_DETACH
