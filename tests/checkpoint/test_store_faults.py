"""A disk that fails costs a save and a line, never a checkpoint that stands and never the training; until it
fails too often.
"""

import contextlib
import errno
import os
import shutil
import threading

import pytest
import torch
from refusals import refusal
from stores import (
    a_life,
    announced_rescue,
    at_step,
    full,
    images_for,
    load,
    options,
    refused,
    resumes_at,
    save,
    steps_of,
    two_checkpoints,
    write,
)

from common.checkpoint import disk, tensors, writer
from common.checkpoint.disk import Damaged
from common.checkpoint.fence import make_anew
from common.checkpoint.folder import checkpoints
from common.errors import UserError
from common.extras.chosen import describe
from common.store.saver import MOST_FAILURES

TRANSIENT = ("ENOMEM", "EIO", "ESTALE")
READS = ("open", "preadv", "read", "fstat", "listdir")
CALLS = ("pwrite", "fsync", "rename", "mkdir", "open", "close", "listdir", "unlink", "rmdir", "stat")


class Failing:
    """`os.NAME` that raises at its k-th call (or from then on), and counts."""

    def __init__(self, name, k, number, forever=False):
        self.name = name
        self.k = k
        self.number = number
        self.forever = forever
        self.real = getattr(os, name)
        self.count = 0

    @property
    def failed(self):
        return self.count >= self.k

    def __call__(self, *args, **kwargs):
        self.count += 1
        fails = self.failed if self.forever else self.count == self.k
        if not fails or self.name == "close":  # the descriptor is gone, whatever close says
            done = self.real(*args, **kwargs)
        if fails:
            raise OSError(self.number, os.strerror(self.number))
        return done

    def __enter__(self):
        setattr(os, self.name, self)
        return self

    def __exit__(self, *error):
        setattr(os, self.name, self.real)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(disk, "RETRY_SECONDS", (0.0,) * len(disk.RETRY_SECONDS))


def names_in(root):
    return [folder.name for _, folder in checkpoints(root.parent)]


@pytest.mark.parametrize("number", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("name", CALLS)
def test_whichever_call_fails_the_checkpoint_before_or_the_new_one_stands(tmp_path, name, number, forever):
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)
    newest = 2
    k = 0
    fired = True
    with a_life(opts) as life:
        saver = life.store.saver
        while fired:
            k += 1
            step = 2 + k
            before = newest
            with Failing(name, k, getattr(errno, number), forever) as fault:
                write(life.store, step)
                fired = fault.failed
            newest = steps_of(opts)[0]
            assert load(root, images) == (newest, True), (name, k)
            if saver.error:
                assert fired and saver.saved is None and newest in (before, step)
            else:
                assert newest == step
            saver.error = None
            assert k < 60
        save(life, step + 1)  # and the next one is as good as ever
        assert load(root, images) == (step + 1, True)


@pytest.mark.parametrize("k", range(1, 7))
def test_a_failed_fsync_is_never_retried_on_the_same_file(opts, monkeypatch, k):
    """All six are made again, with other files in another folder; after the last one under another name."""
    seen = []
    real = os.fsync

    def fails(fd):
        seen.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(seen) == k:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd)

    with a_life(opts) as life:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails)
            save(life, 1)
        assert len(seen) == 6 + k and seen.count(seen[k - 1]) == 1 + (k == 6), seen
        assert names_in(life.store.fence.root)[0] == "step-00000001" + (".1" if k == 6 else "")


def test_failed_saves_are_said_retried_at_the_next_interval_and_end_the_run_after_three(
    tmp_path, monkeypatch
):
    opts = options(tmp_path, save_every=2)
    with a_life(opts) as life:
        store = life.store
        save(life, 2)
        monkeypatch.setattr(tensors, "write_file", full)
        for number, step in enumerate((4, 6, 8), 1):
            at_step(life.state, step - 1)
            assert not store.due()
            write(store, step)
            assert store.due()
            if number < MOST_FAILURES:
                store.check()
                store.check()  # each is said once
                assert len(life.said) == number
                assert life.said[-1].startswith(f"save failed ({number} in a row), training goes on")
        with refusal(f"No space left.*\nwhat is in {opts.run_dir}", code=4):
            store.check()
        monkeypatch.undo()
        save(life, 8)
        assert store.saver.failures == 0
    assert steps_of(opts) == [8, 2]


def test_what_no_start_would_read_is_a_failed_save_or_refused_at_the_start(tmp_path, monkeypatch):
    """It leaves the ones before in their place, and nothing in staging."""
    opts, _ = two_checkpoints(tmp_path)
    with a_life(opts) as life, monkeypatch.context() as patch:
        patch.setattr(writer, "finite", lambda facts: {"step": facts["step"]})
        with pytest.raises(Damaged, match="state.json"):
            announced_rescue(life.store, 3)
        patch.undo()
        patch.setattr(disk, "MOST_BYTES", 1 << 14)
        life.state.progress.evaluated = {"step": 3} | {f"accuracy of class {k}": 0.1 for k in range(2000)}
        with pytest.raises(Damaged, match="state.json"):
            save(life, 3)
        assert steps_of(opts) == [2, 1] and not [*opts.run_dir.rglob("step-*03*")]
    monkeypatch.setattr(disk, "MOST_BYTES", 1 << 10)
    opts = options(tmp_path / "new")
    refused(opts, r"[0-9,]+ bytes, more than 1,024\nchoose a folder")
    assert not (opts.run_dir / "options.json").exists()
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(bytes(2000))
    make_anew(log, may_log=True)  # of millions of steps: it is copied, whatever its length


def test_a_name_that_readers_of_the_format_do_not_take_is_refused_at_the_start(opts):
    net = torch.nn.Module()
    net.register_buffer("__metadata__", torch.zeros(2))
    refused(opts, "__metadata__ .* cannot be saved", net=net)


@pytest.mark.parametrize("where", ["Image.copy", "write_at"])
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=repr)
def test_a_save_without_memory_is_a_failed_save_that_leaves_no_file(opts, monkeypatch, where, error):
    def none_left(*_):
        raise error

    with a_life(opts) as life:
        save(life, 1)
        with monkeypatch.context() as patch:
            patch.setattr(f"common.checkpoint.tensors.{where}", none_left)
            write(life.store, 2)
        life.store.check()
        assert life.said[-1].startswith("save failed (1 in a row), training goes on")
        assert not list(life.store.writer.staging.iterdir())
        life.store.save()  # the next interval
    assert resumes_at(opts, 2)


def test_the_last_save_is_retried_and_a_run_that_cannot_be_saved_does_not_end_well(opts, monkeypatch):
    with a_life(opts) as life, monkeypatch.context() as patch:
        patch.setattr(tensors, "write_file", full)
        write(life.store, 1)
        patch.undo()
        life.store.close()
        assert steps_of(opts) == [1]
    with refusal(code=4), a_life(opts) as life:
        monkeypatch.setattr(tensors, "write_file", full)
        write(life.store, 2)
    assert steps_of(opts) == [1]


def test_later_facts_of_a_step_get_a_name_of_their_own_and_earlier_ones_do_not_follow_them(tmp_path):
    """On any file system, also one that cannot swap two names."""
    opts, root = two_checkpoints(tmp_path, steps=(1,))
    for k, accuracy in ((1, 0.5), (2, 0.7)):
        with a_life(opts) as life:
            life.state.record_evaluation({"val_loss": 1.0, "val_acc": accuracy})
            save(life, 1)
            assert not announced_rescue(life.store)
            life.state.progress.evaluated = {}
            assert not announced_rescue(life.store), "of a rank that has not evaluated yet"
        assert names_in(root) == [f"step-00000001.{k}"]
        with a_life(opts) as life:
            assert life.state.progress.best["val_acc"] == accuracy


def test_a_process_that_can_start_no_thread_any_more_still_saves(opts, monkeypatch):
    def none_left(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tensors, "CHUNK_BYTES", 64)
    with a_life(opts) as life:
        save(life, 1)  # its writer was started when there were threads
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            save(life, 2)
            assert announced_rescue(life.store, 3)
            assert all(describe(*checkpoint)[0] for checkpoint in checkpoints(opts.run_dir))
    assert steps_of(opts) == [3, 2, 1]


def test_a_net_that_changes_its_shape_is_an_error_and_not_a_lie(opts):
    with a_life(opts) as life:
        life.state.net[0].weight.data = torch.zeros(4, 4)
        with refusal("0.weight came, went or changed"):
            life.store.save()
        life.state.net[0].weight.data = torch.zeros(2, 3)
        save(life, 1)  # nothing is locked for ever
    assert steps_of(opts) == [1]


def test_a_run_folder_that_cannot_be_used_is_said_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "run").write_text("a file")
    refused(options(tmp_path), "choose a folder that can be written to")
    opts = options(tmp_path / "deep" / "down")
    with Failing("mkdir", 1, errno.EACCES):
        refused(opts, "Permission denied")
    with Failing("mkdir", 1, errno.EIO):  # a restart may find it cured
        refused(opts, "Input/output error", code=1)
    monkeypatch.setattr("common.checkpoint.fence.STALE_SECONDS", 0.5)
    for k in range(1, 7):  # whatever fails at the start: a clear word, and then it works
        for name in ("fsync", "rename", "pwrite", "fdatasync"):
            with Failing(name, k, errno.ENOSPC) as fault:
                try:
                    with a_life(opts):
                        pass
                except UserError as error:
                    assert fault.failed and "choose a folder that can be written to" in str(error)
        assert {path.name for path in opts.run_dir.iterdir()} <= {"checkpoints", "lock", "options.json"}
        shutil.rmtree(tmp_path / "deep")


# ---- what cannot be read is not wrong -------------------------------------------------------------
@pytest.mark.parametrize("number", TRANSIENT)
@pytest.mark.parametrize("name", READS)
def test_whichever_read_fails_once_the_newest_checkpoint_is_loaded(tmp_path, name, number):
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)
    k = 0
    fired = True
    while fired:
        k += 1
        with Failing(name, k, getattr(errno, number)) as fault:
            assert load(root, images) == (2, True), k
        with Failing(name, k, getattr(errno, number)) as other, contextlib.suppress(UserError):
            assert resumes_at(opts, 2), k  # or it is said, and the agent starts again
        fired = fault.failed or other.failed
        assert steps_of(opts) == [2, 1] and not list(root.glob("damaged-*")), k
    assert k > 1


@pytest.mark.parametrize("number", TRANSIENT)
def test_what_stays_unreadable_ends_the_start_and_is_neither_passed_over_nor_put_aside_nor_deleted(
    tmp_path, monkeypatch, number
):
    opts, root = two_checkpoints(tmp_path, steps=(1, 9))
    real = os.open
    before = sorted(root.rglob("*"))

    def fails(path, *args, **kwargs):
        if str(path).endswith("step-00000009/optimizer.safetensors"):
            raise OSError(getattr(errno, number), "away", str(path))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        said = "step-00000009: cannot be read: .*; nothing shows that it is damaged"
        refused(opts, said, code=1)  # an agent tries again: the disk may answer then
        assert sorted(root.rglob("*")) == before
        assert "could not be read: " in describe(9, root / "step-00000009")[1]
    assert resumes_at(opts, 9)
