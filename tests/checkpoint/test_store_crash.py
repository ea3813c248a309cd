"""A power loss at any point leaves the checkpoint before or the new one: every state a disk may be in
afterwards is built and read.

Every call that changes the disk is recorded during real saves. A crash after the first k of them keeps what
was synced; of the rest, names may be there up to any point, or all but one, or only one, and bytes not at
all, in part, or as zeros. POSIX promises no more than that.
"""

import itertools
import os
import shutil
from pathlib import Path

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

from common.checkpoint.folder import checkpoints
from common.extras.audit import Audit
from common.extras.chosen import describe
from common.ledger.log import Metrics

STEPS = (1, 2, 3, 4, 4, 5)  # the second 4 has other facts; 5 is a rescue; with keep=2 the others delete
LOSSES = (  # of bytes that are not synced
    lambda old, new: new,
    lambda old, new: old,
    lambda old, new: new[: len(new) // 2],
    lambda old, new: bytes(len(new)),
)


def recorded(root, patch):
    """A list into which each change of the disk under `root` goes from now on: (what, path, more)."""
    ops = []

    def note(name):
        real = getattr(os, name)

        def call(target, *args, **more):
            path = Path(os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target)
            # not really synced: this disk is ours
            done = None if name == "fsync" else real(target, *args, **more)
            if root not in (path, *path.parents) or path.name.endswith("lock"):
                return done
            if name == "pwrite":
                ops.append((name, path, (args[1], bytes(args[0][:done]))))
            elif name != "open" or args[0] & os.O_CREAT:
                ops.append((name, path, *args[:1]))
            return done

        patch.setattr(os, name, call)

    patch.setattr(shutil, "_use_fd_functions", False)  # rmtree by paths
    for name in ("mkdir", "open", "pwrite", "fsync", "rename", "link", "unlink", "rmdir"):
        note(name)
    return ops


class Disk:
    """Inodes, the changes to names that are not on the disk yet, and the bytes that are."""

    def __init__(self, root):
        self.root = root
        self.now = {-1: {"": 0}, 0: {}}  # folders as the running system sees them; the root is number 0
        self.data = {}
        self.synced = {}
        self.changes = []  # [durable, [(folder, name, inode or None), ...]]

    def at(self, path):
        """(folder's inode, name, inode) of a path under the root."""
        folder = -1
        name = ""
        for part in path.relative_to(self.root).parts:
            folder = self.now[folder][name]
            name = part
        return folder, name, self.now[folder].get(name)

    def change(self, *entries):
        enter(self.now, entries)
        self.changes.append([False, entries])

    def do(self, what, path, more=None):
        folder, name, inode = self.at(path)
        if what in ("mkdir", "open"):
            inode = len(self.now) + len(self.data)
            if what == "mkdir":
                self.now[inode] = {}
            else:
                self.data[inode] = self.synced[inode] = b""
            self.change((folder, name, inode))
        elif what == "pwrite":
            at, new = more  # by several threads, in any order
            old = self.data[inode].ljust(at, b"\0")
            self.data[inode] = old[:at] + new + old[at + len(new) :]
        elif what == "fsync" and inode in self.data:
            self.synced[inode] = self.data[inode]
        elif what == "fsync":
            for change in self.changes:
                change[0] = change[0] or any(entry[0] == inode for entry in change[1])
        elif what in ("rename", "link"):
            to, as_name, _ = self.at(Path(more))
            gone = [(folder, name, None)] if what == "rename" else []
            self.change(*gone, (to, as_name, inode))
        else:
            self.change((folder, name, None))

    def crashes(self):
        """(in order?, tree) of every state this crash may leave; a tree is {path: bytes or None for a
        folder}.
        """
        pending = [i for i, (durable, _) in enumerate(self.changes) if not durable]
        kept = [(True, set(pending[:n])) for n in range(len(pending) + 1)]
        kept += [(False, set(pending) - {i}) for i in pending] + [(False, {i}) for i in pending]
        losses = LOSSES if self.data != self.synced else LOSSES[:1]
        for (ordered, some), lost in itertools.product(kept, losses):
            folders = {inode: {} for inode in self.now}
            data = {
                inode: new if new == self.synced[inode] else lost(self.synced[inode], new)
                for inode, new in self.data.items()
            }
            for i, (durable, entries) in enumerate(self.changes):
                if durable or i in some:
                    enter(folders, entries)
            yield ordered, dict(files_of(0, folders, data, ""))


def enter(folders, entries):
    for folder, name, inode in entries:
        folders[folder][name] = inode


def files_of(inode, folders, data, path):
    for name, child in folders[inode].items():
        if child in folders:
            yield f"{path}{name}", None
            yield from files_of(child, folders, data, f"{path}{name}/")
        elif child is not None:
            yield f"{path}{name}", data[child]


def record(opts, root, monkeypatch):
    """The changes of some saves and a rescue; where each begins, ("begin", facts), and ("announce",)."""
    root.mkdir(parents=True)
    with monkeypatch.context() as patch:
        ops = recorded(root, patch)
        with a_life(opts, Adapted()) as life:
            for number, step in enumerate(STEPS):
                at_step(life.state, step).progress.best = {"val_acc": number, "step": step}
                ops.append(("begin", life.state.facts()))
                if step < STEPS[-1]:
                    save(life, step)
                else:
                    assert announced_rescue(life.store)
                ops.append(("announce",))
    return ops


@SAMPLED
def test_every_crash_state_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path, monkeypatch, every):
    opts = options(tmp_path / "real")
    root = opts.run_dir / "checkpoints"
    disk = Disk(root)
    images = images_for(opts, Adapted())
    last = None
    coming = None
    announced = 0
    seen = set()
    for what, *about in record(opts, root, monkeypatch):
        if what == "begin":
            coming = about[0]
        elif what == "announce":
            last = coming
            announced += 1
        else:
            disk.do(what, *about)
        for ordered, tree in disk.crashes():
            key = (ordered, announced, frozenset(tree.items()))
            if key not in seen:
                seen.add(key)
                if len(seen) % every == 0:
                    whole = min(announced, opts.keep)
                    check(tmp_path / "state/checkpoints", tree, ordered, [last, coming], whole, images)
    assert len(seen) >= 500


def check(root, tree, ordered, allowed, whole, images):
    """Read the disk that a crash has left."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path, data in tree.items():
        if path.startswith("step-"):  # the rest is swept unread
            if data is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(data)
    facts = dict(load_into(images, root).facts) or None
    if facts:
        del facts["origin"]
        assert images_are_at(images, facts["step"])
    assert facts in allowed, (facts, allowed)  # None: nothing, before the first was announced
    if ordered:  # as a journal keeps it: nothing that is named is damaged
        lines = [describe(*choice) for choice in checkpoints(root.parent)]
        assert all(is_whole for is_whole, _ in lines) and len(lines) >= whole, lines


def test_what_a_checkpoint_tells_is_on_the_disk_before_its_name_is(opts, monkeypatch):
    """After a power cut the lines of metrics, ledger and audit reach as far as the newest checkpoint."""
    durable = {}
    named = []
    real = os.rename

    def synced(fd):
        durable[os.path.realpath(f"/proc/self/fd/{fd}")] = os.fstat(fd).st_size

    def rename(source, target):
        if os.path.basename(target).startswith("step-"):
            for path in opts.run_dir.rglob("*.jsonl"):
                is_durable = durable.get(str(path)) == path.stat().st_size > 0
                named.append(is_durable and str(path.parent) in durable)
        real(source, target)

    with a_life(opts) as life, monkeypatch.context() as patch:
        for name, function in (("fdatasync", synced), ("fsync", synced), ("rename", rename)):
            patch.setattr(os, name, function)
        metrics = Metrics(opts.run_dir, 0)
        audit = Audit(opts.run_dir, life.store.world.life, 1)
        for step in (1, 2):
            audit.begin(step, [step])
            metrics.write({"step": step, "loss": 0.5})
            save(life, step)
        assert announced_rescue(life.store, 3)
        metrics.close()
    assert {path.name for path in opts.run_dir.glob("*.jsonl")} == {"ledger.jsonl", "metrics.jsonl"}
    assert all(named), named
