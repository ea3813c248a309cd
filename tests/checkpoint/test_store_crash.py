"""A power loss at any point leaves the checkpoint before or the new one: every state a disk may be in
afterwards is built and read.

Every call that changes the disk is recorded during real saves. A crash after the first k of them keeps what
was synced; of the rest, names may be there up to any point, or all but one, or only one, or at random, and
bytes not at all, in part, or as zeros. POSIX promises no more than that.
"""

import itertools
import os
import random
import shutil

from stores import (
    SAMPLED,
    Adapted,
    a_life,
    announced_rescue,
    at_step,
    images_are_at,
    images_for,
    load_into,
    options,
    save,
)

from common.checkpoint.folder import committed
from common.extras.audit import Audit
from common.extras.chosen import describe
from common.ledger import Ledger
from common.ledger.log import Metrics

STEPS = (1, 2, 3, 4)  # with keep=2: the last two delete


class Recorder:
    """Notes what happens under `root`, in order: (what, path, ...)."""

    def __init__(self, root, monkeypatch):
        self.root = str(root)
        self.ops = []
        for name in ("mkdir", "open", "pwrite", "fsync", "rename", "link", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.noting(name, getattr(os, name)))

    def noting(self, name, real):
        link = os.readlink

        def path_of(path, dir_fd):
            if isinstance(path, int):
                return link(f"/proc/self/fd/{path}")
            return os.path.join("" if dir_fd is None else link(f"/proc/self/fd/{dir_fd}"), os.fspath(path))

        def call(target, *args, dir_fd=None, **more):
            path = path_of(target, dir_fd)
            if name == "fsync":
                done = None  # not really: this disk is ours
            else:
                done = real(target, *args, **more, **{"dir_fd": dir_fd} if dir_fd is not None else {})
            if path != self.root and not path.startswith(self.root + "/"):
                return done
            if name in ("rename", "link"):
                self.ops.append((name, path, path_of(args[0], None)))
            elif name == "pwrite" and not path.endswith("lock"):
                self.ops.append(("write", path, (args[1], bytes(args[0][:done]))))
            elif name == "open" and args[0] & os.O_CREAT and not path.endswith("lock"):
                self.ops.append(("create", path))
            elif name not in ("pwrite", "open"):
                self.ops.append((name, path))
            return done

        return call

    def announce(self, facts):
        self.ops.append(("announce", facts))

    def begin(self, facts):
        self.ops.append(("begin", facts))


class Disk:
    """Inodes, the changes to names that are not on the disk yet, and the bytes that are."""

    def __init__(self, root):
        self.root = root
        self.count = itertools.count(1)
        self.now = {0: {}}  # folders as the running system sees them
        self.data = {}
        self.synced = {}
        self.changes = []  # [durable, [(folder, name, inode or None), ...]]

    def at(self, path):
        """(folder's inode, name, inode) of a path under the root."""
        folder = None
        name = ""
        inode = 0
        for part in path[len(self.root) :].strip("/").split("/") if path != self.root else ():
            folder = inode
            name = part
            inode = self.now[inode].get(part)
        return folder, name, inode

    def change(self, *entries):
        for folder, name, inode in entries:
            if inode is None:
                self.now[folder].pop(name, None)
            else:
                self.now[folder][name] = inode
        self.changes.append([False, entries])

    def do(self, what, path, other=None):
        folder, name, inode = self.at(path)
        if what in ("mkdir", "create"):
            new = next(self.count)
            if what == "mkdir":
                self.now[new] = {}
            else:
                self.data[new] = self.synced[new] = b""
            self.change((folder, name, new))
        elif what == "write":
            at, new = other  # by several threads, in any order
            old = self.data[inode].ljust(at, b"\0")
            self.data[inode] = old[:at] + new + old[at + len(new) :]
        elif what == "fsync" and inode in self.now:
            for change in self.changes:
                change[0] = change[0] or any(entry[0] == inode for entry in change[1])
        elif what == "fsync":
            self.synced[inode] = self.data[inode]
        elif what == "rename":
            to, as_name, _ = self.at(other)
            self.change((folder, name, None), (to, as_name, inode))
        elif what == "link":
            to, as_name, _ = self.at(other)
            self.change((to, as_name, inode))
        elif what in ("unlink", "rmdir"):
            self.change((folder, name, None))

    def crashes(self, rng):
        """(in order?, tree) of every state this crash may leave; a tree is {path: bytes or None for a
        folder}.
        """
        pending = [i for i, (durable, _) in enumerate(self.changes) if not durable]
        kept = [(True, set(pending[:n])) for n in range(len(pending) + 1)]
        kept += [(False, set(pending) - {i}) for i in pending] + [(False, {i}) for i in pending]
        kept += [(False, {i for i in pending if rng.random() < 0.5}) for _ in range(4)]
        dirty = [i for i in self.data if self.data[i] != self.synced[i]]
        for ordered, some in kept:
            folders = {inode: {} for inode in self.now}
            for i, (durable, entries) in enumerate(self.changes):
                for folder, name, inode in entries if durable or i in some else ():
                    if inode is None:
                        folders[folder].pop(name, None)
                    else:
                        folders[folder][name] = inode
            for lost in (
                lambda old, new: new,
                lambda old, new: old,
                lambda old, new: new[: len(new) // 2],
                lambda old, new: bytes(len(new)),
            )[: 4 if dirty else 1]:
                data = {
                    i: lost(self.synced[i], self.data[i]) if i in dirty else self.data[i] for i in self.data
                }
                yield ordered, dict(self._walk(0, folders, data, ""))

    def _walk(self, inode, folders, data, path):
        for name, child in folders[inode].items():
            if child in folders:
                yield f"{path}{name}", None
                yield from self._walk(child, folders, data, f"{path}{name}/")
            else:
                yield f"{path}{name}", data[child]


def record(tmp_path, monkeypatch):
    """(opts, ops): some saves, one of the same step again with news, and a rescue."""
    opts = options(tmp_path)
    (opts.run_dir / "checkpoints").mkdir(parents=True, mode=0o700)
    opts.run_dir.chmod(0o700)
    with monkeypatch.context() as patch:
        recorder = Recorder(opts.run_dir / "checkpoints", patch)
        with a_life(opts, Adapted()) as life:
            for step in (*STEPS, STEPS[-1], STEPS[-1] + 1):
                at_step(life.state, step)
                if step == STEPS[-1]:
                    life.state.progress.best = {
                        "val_acc": life.state.progress.best.get("val_acc", 0) + 1,
                        "step": step,
                    }
                recorder.begin(life.state.facts())
                if step > STEPS[-1]:
                    assert announced_rescue(life.store)
                else:
                    life.store.save()
                    life.store.saver.wait()
                    assert not life.store.saver.error, life.store.saver.error
                recorder.announce(life.state.facts())
    return opts, recorder.ops


@SAMPLED
def test_every_crash_state_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path, monkeypatch, every):
    opts, ops = record(tmp_path / "real", monkeypatch)
    kinds = "mkdir create write fsync rename link unlink rmdir begin announce".split()
    assert {op[0] for op in ops} == set(kinds)
    disk = Disk(f"{opts.run_dir}/checkpoints")
    images = images_for(opts, Adapted())
    rng = random.Random(7)
    last = None
    coming = None
    announced = 0
    seen = set()
    states = 0
    trees = set()
    for op in ops:
        if op[0] == "begin":
            coming = op[1]
        elif op[0] == "announce":
            last = op[1]
            coming = None
            announced += 1
        else:
            disk.do(*op)
        for ordered, tree in disk.crashes(rng):
            states += 1
            key = (ordered, announced, coming is None, tuple(sorted(tree.items(), key=lambda item: item[0])))
            trees.add(key[3])
            if key not in seen:
                seen.add(key)
                if len(seen) % every == 0:
                    whole = min(announced, opts.keep, len(STEPS))
                    check(tmp_path / "state", tree, ordered, [last, coming], whole, images)
    assert states >= 2000 and len(trees) >= 300


def check(root, tree, ordered, allowed, whole, images):
    """Read the disk that a crash has left."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for path, data in sorted(tree.items()):
        if path.startswith("step-"):  # the rest is swept unread
            (root / path).mkdir() if data is None else (root / path).write_bytes(data)
    found = load_into(images, root)
    facts = {name: fact for name, fact in found.facts.items() if name != "origin"} or None
    assert facts in allowed, (facts, allowed)  # None: nothing, before the first was announced
    assert facts is None or images_are_at(images, facts["step"])
    if ordered:  # as a journal keeps it: nothing that is named is damaged
        good = 0
        for number, folder in committed(root):
            is_whole, line = describe(number, folder)
            assert is_whole, line
            good += 1
        assert good >= whole


def test_what_a_checkpoint_tells_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """After a power cut the lines of metrics, ledger and audit reach as far as the newest checkpoint."""
    opts = options(tmp_path)
    durable = {}
    named = []
    real = os.rename

    def synced(fd):
        durable[os.readlink(f"/proc/self/fd/{fd}")] = os.fstat(fd).st_size

    def rename(source, target):
        if os.path.basename(target).startswith("step-"):
            named.append(
                [
                    durable.get(str(path)) == path.stat().st_size > 0 and str(path.parent) in durable
                    for path in opts.run_dir.rglob("*.jsonl")
                ]
            )
        real(source, target)

    with a_life(opts) as life:
        for name, function in (("fdatasync", synced), ("fsync", synced), ("rename", rename)):
            monkeypatch.setattr(os, name, function)
        world = life.store.world
        ledger = Ledger(opts.run_dir)
        metrics = Metrics(opts.run_dir, 0)
        audits = [Audit(opts.run_dir, world.life, rank) for rank in range(2)]
        for step in (1, 2):
            for audit in audits:
                audit.begin(step, [step])
            ledger.event("first_step", step=step)
            metrics.write({"step": step, "loss": 0.5})
            save(life, step)
        assert announced_rescue(life.store, 3)
        monkeypatch.undo()
        metrics.close()
    assert named == [[True] * 4] * 3
