"""A bucket follows the run (--copy-to), and a machine with an empty disk starts from it."""

import itertools
import json
import shutil
import signal

import pytest
from jobs import PACED, digest, until
from refusals import refusal
from s3 import server
from stores import Adapted, a_life, announced_rescue, is_at, options, refused, resumes_at, save

from common.extras.bucket import Bucket
from common.extras.differ import roll_back

pytest.importorskip("s3fs")
pytest.importorskip("moto")
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture(scope="module")
def s3():
    with server() as running:
        yield running


@pytest.fixture
def spot(s3, jobs, tmp_path):
    """spot(machine, flags): the same command on a machine with a disk of its own."""

    def start(machine, *flags, nproc=1, url="", **env):
        url = url or s3.url(tmp_path.name)  # each test has its own
        words = ["train_ddp.py", *PACED, "--virtual-ranks=4", f"--run-dir={tmp_path / machine}"]
        words += [f"--copy-to={url}", "--save-every=4", *flags]
        env = {"PACE": "0.02"} | s3.env | env
        return jobs.torchrun(nproc, *words, **env) if nproc > 1 else jobs.python(*words, **env)

    return start


def test_a_spot_run_goes_on_on_another_machine_with_an_empty_disk_and_ends_with_the_same_bits(
    s3, spot, tmp_path
):
    """Two machines vanish, one of them with a warning; the third one ends with what a run of one disk has."""
    first = spot("first", nproc=2, PACE="1")
    until(lambda: s3.names(tmp_path.name), "a checkpoint in the bucket")
    [first.jobs.kill(pid) for pid in (*first.workers, first.pid)]
    shutil.rmtree(tmp_path / "first")

    second = spot("second", "--save-every=1000", PACE="0.5")
    until(lambda: "epoch 2/2" in second.output, "the second epoch")
    second.kill(signal.SIGTERM)
    said = second.ends_with(143)
    assert "saved by rank 0\ncopying the newest checkpoint to" in said and "\nit is there\n" in said
    shutil.rmtree(tmp_path / "second")

    said = spot("third", nproc=3).ends_with(0)
    assert "resuming at step" in said and "epoch 2, position" in said and said.endswith("\nit is there\n")
    spot("undisturbed", url=f"file://{tmp_path}/copy").ends_with(0)
    assert digest(tmp_path / "third") == digest(tmp_path / "undisturbed") == digest(tmp_path / "copy")
    steps = [json.loads(line)["step"] for line in open(tmp_path / "third/metrics.jsonl") if '"epoch"' in line]
    assert steps == [*range(1, 23)], "the curve goes over all machines"


def test_a_bucket_that_is_away_stops_no_training_is_told_once_and_gets_what_it_missed(spot):
    away = {"AWS_ENDPOINT_URL": NOWHERE}
    spot("first", "--max-steps=4").ends_with(0)
    said = spot("first", "--max-steps=14", **away).ends_with(0)
    assert said.count("warning: s3://") == 1 and "it is not there: Could not connect" in said
    said = spot("second", **away).ends_with(1)
    assert "cannot be read" in said and "Traceback" not in said, "what it has may be all there is"
    spot("first", "--max-steps=14").ends_with(0)  # complete: nothing is copied
    assert "resuming at step 4," in spot("second", "--max-steps=5").ends_with(0)
    spot("first", "--max-steps=15").ends_with(0)
    assert "resuming at step 15," in spot("third", "--max-steps=16").ends_with(0)


# ---- in this process: a copy at each save, when the test wants it ------------------------------------
class Killed(BaseException):
    pass


class Dying:
    """A file system that ends its process at the n-th change, in the middle of what it writes."""

    def __init__(self, files, changes):
        self.files = files
        self.changes = changes

    def __getattr__(self, name):
        act = getattr(self.files, name)
        if name not in ("put_file", "copy", "rm", "makedirs"):
            return act

        def dying(path, *more, **how):
            self.changes -= 1
            if self.changes < 0:
                if name == "put_file":
                    open(more[0], "wb").write(open(path, "rb").read(99))  # a part of it
                raise Killed
            act(path, *more, **how)

        return dying


@pytest.fixture
def at_will(monkeypatch):
    monkeypatch.setattr(Bucket, "follow", lambda self, *gone: None)


def machine(tmp_path, name, **flags):
    return options(tmp_path / name, **{"copy_to": f"file://{tmp_path}/copy"} | flags)


def copy(life):
    life.store.saver.bucket._copy(())


def test_a_kill_at_any_change_leaves_what_was_there_before_or_the_new_one(tmp_path, at_will):
    for changes in itertools.count():
        folder = tmp_path / str(changes)
        was_killed = False
        with a_life(machine(folder, "first")) as life:
            for step in (1, 2, 3, 4):
                save(life, step)
                if step == 4:
                    life.store.saver.bucket.files = Dying(life.store.saver.bucket.files, changes)
                try:
                    copy(life)
                except Killed:
                    was_killed = True
        with a_life(machine(folder, "second")) as life:
            step = life.state.progress.step
            assert step in ((3, 4) if was_killed else (4,)) and is_at(life.state, step)
        with a_life(machine(folder, "first")) as life:
            copy(life)
        files = sorted(path.parent.name for path in (folder / "copy").glob("*/*/*"))
        assert files == ["step-00000003"] * 5 + ["step-00000004"] * 5, "no half one is left"
        if not was_killed:
            break
    assert changes > 8


def test_what_the_bucket_has_is_not_sent_again_nor_what_stands_still(tmp_path, at_will, monkeypatch):
    sent = set()

    def sends(life):
        sent.clear()
        copy(life)
        return sent - {"options.json", "ledger.jsonl", "metrics.jsonl"}

    first = machine(tmp_path, "first")
    with a_life(first, Adapted()) as life:
        files = life.store.saver.bucket.files
        put = files.put_file

        def noted(source, path):
            sent.add(path.rpartition("/")[2])
            put(source, path)

        monkeypatch.setattr(files, "put_file", noted)
        save(life, 1)
        facts = {"state.json", "manifest.json"}
        trained = facts | {"model.safetensors", "optimizer.safetensors"}
        assert sends(life) == trained | {"frozen.safetensors"}
        assert sends(life) == set()
        life.state.progress.evaluated = {"step": 1, "val_loss": 0.5}
        save(life, 1)
        assert sends(life) == facts
        save(life, 2)
        assert sends(life) == trained
    for older in (tmp_path / "copy/checkpoints").glob("step-00000001*"):
        shutil.rmtree(older)
    assert resumes_at(machine(tmp_path, "second"), 2, Adapted())


def test_a_wrong_byte_in_the_bucket_is_found_before_anything_is_loaded(tmp_path, at_will):
    with a_life(machine(tmp_path, "first")) as life:
        for step in (1, 2):
            save(life, step)
            copy(life)
    older, newest = sorted((tmp_path / "copy/checkpoints").iterdir())
    for path in sorted(newest.iterdir()):
        data = path.read_bytes()
        spoil(path)
        assert resumes_at(machine(tmp_path, path.name), 1), path.name
        path.write_bytes(data)
    for folder in (older, newest):
        spoil(folder / "model.safetensors")
    refused(machine(tmp_path, "last"), "checkpoints found, none verifies", code=3)
    assert not [*tmp_path.glob("last/run/checkpoints/step-*")]


def spoil(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_the_bucket_of_another_run_is_refused_whatever_the_disk_holds(tmp_path, at_will):
    with a_life(machine(tmp_path, "first")) as life:
        save(life, 1)
        copy(life)
    refused(machine(tmp_path, "second", lr=0.02), "has another run")
    with a_life(machine(tmp_path, "second", lr=0.02, copy_to="")) as life:
        save(life, 2)
    with a_life(machine(tmp_path, "second", lr=0.02)) as life, refusal("has another run"):
        copy(life)
    assert resumes_at(machine(tmp_path, "third"), 1)


def test_a_url_that_needs_what_is_not_installed_is_refused(tmp_path):
    refused(
        machine(tmp_path, "first", copy_to="oss://bucket/run"), "--copy-to oss://bucket/run.*\n.*pip install"
    )


def test_what_the_disk_keeps_the_bucket_keeps_over_all_machines(tmp_path, at_will):
    for name, steps in (("first", range(1, 8)), ("second", range(8, 10))):
        with a_life(machine(tmp_path, name, keep_every=3)) as life:
            for step in steps:
                if step == 2:
                    life.state.progress.best = {"step": 2, "val_acc": 1.0, "loss": 0.0}
                save(life, step)
                copy(life)
    assert steps_in(tmp_path / "copy") == [2, 3, 6, 8, 9]
    assert steps_in(tmp_path / "second/run") == [2, 8, 9], "the best one comes along"


def test_a_start_has_the_newest_checkpoint_once_it_has_the_best_one_too(tmp_path, at_will, monkeypatch):
    with a_life(machine(tmp_path, "first")) as life:
        for step in (1, 2):
            life.state.progress.best = {"step": 1, "val_acc": 1.0, "loss": 0.0}
            save(life, step)
            copy(life)
    real = Bucket._fetch
    monkeypatch.setattr(Bucket, "_fetch", lambda self, name: real(self, name) if name[-1] == "2" else 1 / 0)
    refused(machine(tmp_path, "second"), "cannot be read", code=1)
    assert steps_in(tmp_path / "second/run") == []


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("checkpoints/step-*"))


def test_what_a_survivor_has_saved_is_copied_by_the_next_life_and_withdrawn_with_it(tmp_path):
    with a_life(machine(tmp_path, "first")) as life:
        save(life, 1)
        announced_rescue(life.store, 2)
    with a_life(machine(tmp_path, "first")) as life:
        until((tmp_path / "copy/checkpoints/step-00000002/manifest.json").exists, "its copy")
        life.store.saver.agreed = 1
        with pytest.raises(RuntimeError):
            roll_back(life.store, RuntimeError("the replicas differ"))
    assert resumes_at(machine(tmp_path, "second"), 1)
