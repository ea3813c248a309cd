"""A bucket follows the run (--copy-to), and a machine with an empty disk starts from it."""

import itertools
import json
import shutil
import signal

import pytest
from jobs import PACED, ROOT, until
from s3 import server
from stores import Adapted, a_life, is_at, options, resumes_at, save

from common.extras.bucket import Bucket
from tests.chaos.checks import digest

pytest.importorskip("s3fs")
pytest.importorskip("moto")
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with server(tmp_path_factory.mktemp("s3")) as running:
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
    assert s3.get(f"{tmp_path.name}/ledger.jsonl") == (tmp_path / "third/ledger.jsonl").read_bytes()
    report = first.jobs.start("-m", "common.ledger", tmp_path / "third", cwd=ROOT).ends_with(0)
    assert "done at step 22" in report and "lives 3" in report


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_a_sender_that_is_killed_in_an_upload_costs_that_upload_alone(s3, spot, tmp_path, file):
    spot("first", "--max-steps=4").ends_with(0)
    with s3.holding(f"/{file}") as held:
        first = spot("first")
        until(held, "an upload")
        first.kill()
        first.wait()
        said = spot("second", "--max-steps=5").ends_with(0)
        assert "resuming at step 4," in said
    assert "step-00000005" in s3.names(tmp_path.name)
    spot("first").ends_with(0)
    names = s3.names(tmp_path.name)
    assert names[-1].startswith("step-00000022")
    places = {key.split("/")[2] for key in s3.keys(tmp_path.name) if "/checkpoints/" in key}
    assert places == {*names}, "no half one is left"


def test_a_wrong_byte_in_the_bucket_is_found_before_anything_is_loaded(s3, spot, tmp_path):
    run = tmp_path.name
    for steps in (4, 8):
        spot("first", f"--max-steps={steps}").ends_with(0)
    newest, *others = reversed(s3.names(run))

    def finds_wrong(machine, *places):
        """A start from a bucket of its own, with a wrong byte in each of these."""
        for key in s3.keys(run):
            data = bytearray(s3.get(key))
            data[len(data) // 2] ^= 4 * key.endswith(places)
            s3.put(key.replace(run, f"{run}-{machine}", 1), bytes(data))
        return spot(machine, "--max-steps=9", url=s3.url(f"{run}-{machine}"))

    files = "model.safetensors", "optimizer.safetensors", "state.json", "options.json", "manifest.json"
    for file in files:
        said = finds_wrong(file, f"{newest}/{file}").ends_with(0)
        assert f"{newest}  damaged: {file}" in said and "resuming at step 4," in said
    said = finds_wrong("last", *(f"{name}/model.safetensors" for name in (newest, *others))).ends_with(3)
    assert "checkpoints found, none verifies" in said and not [*tmp_path.glob("last/checkpoints/step-*")]


def test_a_bucket_that_is_away_stops_no_training_is_told_once_and_gets_what_it_missed(s3, spot, tmp_path):
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


def test_what_a_survivor_has_saved_is_copied_by_the_next_life(s3, spot, tmp_path):
    job = spot("first", "--save-every=1000", nproc=2, PACE="0.5")
    until(lambda: "step 5/22" in job.output, "step 5")
    job.jobs.kill(job.workers[0])
    until(lambda: s3.names(tmp_path.name), "what rank 1 has saved")
    assert job.ends_with(0)
    (rescued,) = [line for line in job.output.splitlines() if "saved by rank" in line]
    assert (
        "resuming at step" in job.output
        and "copying" not in job.output.split(rescued)[1].split("resuming")[0]
    )


def test_the_bucket_of_another_run_is_refused_whatever_the_disk_holds(s3, spot, tmp_path):
    spot("first", "--max-steps=4").ends_with(0)
    keys = s3.keys(tmp_path.name)
    said = spot("second", "--lr=0.02").ends_with(2)
    assert "has another run" in said and not [*(tmp_path / "second/checkpoints").glob("step-*")]
    spot("second", "--lr=0.02", "--max-steps=4", url=s3.url("elsewhere")).ends_with(0)
    said = spot("second", "--lr=0.02").ends_with(2)
    assert "has another run" in said and "it is there" not in said
    assert s3.keys(tmp_path.name) == keys


def test_a_url_that_needs_what_is_not_installed_is_refused_in_three_lines(spot):
    said = spot("first", url="oss://bucket/run").ends_with(2)
    error = said[said.index("error:") :]
    assert "--copy-to oss://bucket/run" in error and "pip install" in error and len(error.splitlines()) <= 3


def test_a_loop_of_ones_own_takes_it_as_an_argument(jobs, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom common.elastic import Elastic\nnet = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\nsamples = [torch.ones(2)] * 8\n"
        "with Elastic(net=net, optimizer=optimizer, dataset=samples, run_dir='run', batch_size=4,\n"
        f"             copy_to='file://{tmp_path}/copy', tensorboard=False) as run:\n"
        "    for batch in run:\n        run.step(run.model(batch.data).mean())\n"
    )
    jobs.python(script, cwd=tmp_path, PYTHONPATH=str(ROOT)).ends_with(0)
    assert digest(tmp_path / "run") == digest(tmp_path / "copy")


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
        return self.dying(act) if name in ("put_file", "copy", "rm", "makedirs") else act

    def dying(self, act):
        def one(path, *more, **how):
            self.changes -= 1
            if self.changes < 0:
                if act.__name__ == "put_file":
                    half = open(path, "rb").read()
                    open(more[0], "wb").write(half[: len(half) // 2])
                raise Killed
            act(path, *more, **how)

        return one


@pytest.fixture
def at_will(monkeypatch):
    monkeypatch.setattr(Bucket, "follow", lambda self, *gone: None)


def machine(tmp_path, name, **flags):
    return options(tmp_path / name, copy_to=f"file://{tmp_path}/copy", keep=2, **flags)


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
        there = sorted(
            path.relative_to(folder / "copy/checkpoints").as_posix()
            for path in (folder / "copy").glob("*/*/*")
        )
        files = "manifest.json", "model.safetensors", "optimizer.safetensors", "options.json", "state.json"
        assert there == [f"step-0000000{n}/{file}" for n in (3, 4) for file in files]
        if not was_killed:
            break
    assert changes > 8


def test_files_that_the_bucket_has_are_not_sent_again(tmp_path, at_will, monkeypatch):
    sent = []
    with a_life(machine(tmp_path, "first")) as life:
        files = life.store.saver.bucket.files
        put = files.put_file
        monkeypatch.setattr(
            files, "put_file", lambda fd, path: (sent.append(path.rpartition("/")[2]), put(fd, path))
        )
        save(life, 1)
        copy(life)
        assert [name for name in sent if "tensors" in name] == ["model.safetensors", "optimizer.safetensors"]
        sent.clear()
        copy(life)
        assert {*sent} <= {"options.json", "ledger.jsonl", "metrics.jsonl"}
        sent.clear()
        life.state.progress.evaluated = {"step": 1, "val_loss": 0.5}
        save(life, 1)
        copy(life)
    assert {*sent} - {"options.json", "ledger.jsonl", "metrics.jsonl"} == {"state.json", "manifest.json"}
    assert resumes_at(machine(tmp_path, "second"), 1)


def test_frozen_weights_are_sent_once_and_another_machine_starts_from_them(tmp_path, at_will, monkeypatch):
    with a_life(machine(tmp_path, "first"), Adapted()) as life:
        save(life, 1)
        copy(life)
        files = life.store.saver.bucket.files
        sent = []
        put = files.put_file
        monkeypatch.setattr(files, "put_file", lambda fd, path: (sent.append(path), put(fd, path)))
        save(life, 2)
        copy(life)
    names = [path.rpartition("/")[2] for path in sent]
    assert "model.safetensors" in names and "frozen.safetensors" not in names
    shutil.rmtree(tmp_path / "copy/checkpoints/step-00000001")
    assert resumes_at(machine(tmp_path, "second"), 2, Adapted())


def test_what_the_disk_keeps_the_bucket_keeps_over_all_machines(tmp_path, at_will):
    for name, steps in (("first", range(1, 8)), ("second", range(8, 10))):
        with a_life(machine(tmp_path, name, keep_every=3)) as life:
            for step in steps:
                if step == 2:
                    life.state.progress.best = {"step": 2, "val_acc": 1.0, "loss": 0.0}
                save(life, step)
                copy(life)
    names = sorted(path.name for path in (tmp_path / "copy/checkpoints").iterdir())
    assert names == [f"step-0000000{step}" for step in (2, 3, 6, 8, 9)]
    disk = sorted(path.name for path in (tmp_path / "second/run/checkpoints").glob("step-*"))
    assert disk == [f"step-0000000{step}" for step in (2, 8, 9)], "the best one comes along"


def test_a_checkpoint_that_is_withdrawn_is_withdrawn_from_the_bucket(tmp_path, monkeypatch):
    with a_life(machine(tmp_path, "first")) as life:
        for step in (1, 2):
            save(life, step)
            until(
                lambda n=step: (tmp_path / f"copy/checkpoints/step-0000000{n}/manifest.json").exists(), "it"
            )
        life.store.saver.agreed = 1
        with pytest.raises(RuntimeError):
            life.store.roll_back(RuntimeError("the replicas differ"))
    assert resumes_at(machine(tmp_path, "second"), 1)
