"""verify makes a segment again, though epochs were raised or the net was in stages, and finds cheats.

tests/test_promises.py has the rest: kills and other worlds, and a forged checkpoint.
"""

import json
import re
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from jobs import CLEAN, audit, events

from common.extras.replay import end_of, main
from common.options import parse_options
from common.sealed import sealed, sha, to_json

OWN = """
import os
import torch

class Points(torch.utils.data.Dataset):
    classes = 2

    def __len__(self):
        return 150

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, int(x[0] > 0)

def data():
    return Points(), Points()

def rate(step, total, opts):
    return 2.0 if step == 4 and os.environ.get("CHEAT") else 1.0
"""
FLAGS = [
    "--virtual-ranks=4",
    "--global-batch-size=16",
    "--workers=0",
    "--no-tensorboard",
    "--log-every=1",
    "--audit",
    "--keep=2",
]
pytestmark = pytest.mark.usefixtures("warm_starts")


def train(jobs, run, *flags, processes=1, script="train_ddp.py", **env):
    flags = [f"--run-dir={run}", *FLAGS, *flags]
    start = partial(jobs.torchrun, processes) if processes > 1 else jobs.python
    start(script, *flags, **env).ends_with(0)
    return run


@pytest.fixture
def warm_starts(jobs, monkeypatch):
    """The scripts that replay starts are forked from the warm process, too."""

    def run(command, stdout):
        job = jobs.start(*command[1:])
        code = job.wait()
        print(job.output if code else "", file=sys.stderr)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr("common.extras.replay.subprocess", SimpleNamespace(run=run, DEVNULL=None))


@pytest.fixture
def verify(capsys):
    """(exit code, output) of python -m common.replay verify."""

    def verify(*arguments):
        code = main(["verify", *map(str, arguments)])
        return code, "".join(capsys.readouterr())

    return verify


def results(output):
    """{(begin, end): result} of the segments."""
    lines = re.findall(r"^steps (\d+) to (\d+): (.+)$", output, re.MULTILINE)
    return {(int(begin), int(end)): result for begin, end, result in lines}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return [f"--dataset={path}:data", "--model=mlp", "--epochs=1", f"--lr-schedule={path}:rate"]


def test_with_keep_every_and_digest_every_a_changed_rate_is_found_and_damage_is_refused(
    jobs, tmp_path, own, verify
):
    run = train(jobs, tmp_path / "run", "--keep-every=3", "--digest-every=1", *own, CHEAT="1")
    code, output = verify(run, "--all")
    found = results(output)
    wrong = {segment: result for segment, result in found.items() if result != "same"}
    assert code == 1 and wrong == {(3, 6): "differs, from step 5 at the latest"}, output
    (run / "checkpoints/step-00000003/model.safetensors").write_bytes(b"")
    code, output = verify(run, "--all")
    assert code == 2 and "damaged" in output, output


def sealed_facts(folder, **changes):
    """Other facts in a checkpoint, under right hashes."""
    facts, manifest = (json.loads((folder / f"{name}.json").read_bytes()) for name in ("state", "manifest"))
    del manifest["seal"]
    (folder / "state.json").write_bytes(state := to_json(facts | changes))
    (folder / "manifest.json").write_bytes(sealed(manifest | {"state": sha(state)}))
    return facts


def test_other_counters_and_a_beginning_that_was_cut_off_are_found(jobs, tmp_path, own, verify):
    run = train(jobs, tmp_path / "run", "--keep-every=4", *own, "--epochs=2")
    end = run / "checkpoints/step-00000012"
    facts = sealed_facts(end)
    for changes, result in (
        ({}, "same"),
        ({"position": facts["position"] + 16}, "differs in its position"),
        ({"epoch": facts["epoch"] + 1}, "differs in its position"),
        ({"best": facts["best"] | {"val_acc": 1.5}}, "differs in its best evaluation"),
        # as if a start had ended there
        ({"best": facts["best"] | {"step": 11}}, "same, but nothing proves its best evaluation, of step 11"),
    ):
        sealed_facts(end, **facts | changes)
        code, output = verify(run, "--from", 8, "--to", 12)
        assert results(output)[8, 12] == result and code == result.startswith("differs"), changes
    sealed_facts(end, **facts)
    sealed_facts(run / "checkpoints/step-00000004", position=0)
    ledger = run / "ledger.jsonl"  # it has no seal
    ledger.write_text(ledger.read_text().replace('"step": 0,', '"step": 4,', 1))
    code, output = verify(run, "--to", 8)
    assert code == 1 and results(output)[0, 4] == "differs in its position", output


def test_an_lr_schedule_over_epochs_that_were_raised_is_the_same_in_stages_or_not_and_its_fork_has_them_too(
    jobs, tmp_path, verify
):
    """The rate falls to the end of the run: a segment has the epochs of the life that made it."""
    flags = ("--model=mlp", "--dataset=random:160x5", "--lr-schedule=cosine", "--keep-every=4")
    run = tmp_path / "run"
    for epochs in (1, 3):
        train(jobs, run, *flags, f"--epochs={epochs}", "--devices=cpu,cpu", script="train_mp.py")
    for begin, end, processes in ((0, 4, 1), (20, 24, 2)):
        code, output = verify(run, "--from", begin, "--to", end, "--nproc", processes)
        assert code == 0 and results(output) == {(begin, end): "same"}, output
    fork = tmp_path / "fork"
    jobs.python("train_ddp.py", f"--fork={run}", "--at=20", f"--run-dir={fork}").ends_with(0)
    assert max(event["step"] for event in events(fork, "save")) == 30


def test_a_file_in_the_run_itself_is_run_only_if_it_is_named_and_without_virtual_ranks_bits_prove_nothing(
    jobs, run, verify
):
    run.mkdir(0o700)
    (run / "own.py").write_text(OWN)
    named = f"--dataset={run}/own.py:data"
    train(jobs, run, named, "--model=mlp", "--epochs=1", "--keep-every=5", "--virtual-ranks=0")
    code, output = verify(run, "--to", 5)
    assert code == 2 and f"name it yourself: --dataset {run}/own.py:data" in output, output
    code, output = verify(run, "--to", 5, named)
    assert code == 0 and "other bits prove nothing" in output, output


def test_what_cannot_be_verified_is_said_in_words(tmp_path, verify):
    code, output = verify(tmp_path)
    assert code == 2 and "options.json" in output and "name the folder of a run" in output


# ---- --fork: a run that leaves another one at a step ----------------------------------------------------
def test_a_fork_shares_its_past_and_its_flags_and_outlives_the_run_it_has_left(jobs, tmp_path, own, verify):
    run = train(jobs, tmp_path / "run", "--keep-every=4", f"--copy-to=file://{tmp_path}/copy", *own)
    again = train(jobs, tmp_path / "again", f"--fork={run}", "--at=4", processes=2)
    assert end_of(run, 10) == end_of(again, 10)
    other = tmp_path / "other"
    said = jobs.python("train_ddp.py", f"--run-dir={other}", f"--fork={run}", "--at=5").ends_with(2)
    assert "no whole checkpoint of step 5" in said, said
    fork = [f"--fork={run}", "--at=4", "--lr=0.1"]
    train(jobs, other, *fork, "--max-steps=6", "--keep-every=5")
    code, said = verify(other, "--all")
    assert code == 0 and "nothing proves step 5, where it begins" in said and "1 of 1 segments" in said, said
    facts = json.loads((other / "options.json").read_text())["options"]
    assert (facts["fork"], facts["at"], facts["lr"], facts["model"]) == (str(run), 4, 0.1, "mlp")
    shutil.rmtree(run)
    train(jobs, other, *fork, processes=2)
    assert end_of(other, 10)[0] != end_of(again, 10)[0] and audit(other) == CLEAN


def test_a_fork_that_lacks_something_is_refused(capsys, tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/options.json").write_text('{"options": {}, "identity": {}}')  # no seal
    for flags, words in (
        (["--fork=x", "--at=3"], "--fork needs --at"),
        (["--fork=nowhere", "--at=3", "--run-dir=new"], "name the folder of a run"),
        (["--fork=damaged", "--at=3", "--run-dir=new"], "options.json is damaged"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_options("", flags, script="ddp")
        assert words in capsys.readouterr().err
