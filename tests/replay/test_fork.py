"""--fork: a run that leaves another one at a step; --skip: samples that it never sees."""
import json
import shutil
from collections import defaultdict

import pytest
from jobs import audit, weights
from test_verify import own, train  # noqa: F401  (own is a fixture)

from common.checkpoint import checkpoints
from common.checkpoint.files import sealed
from common.options import parse_options

CLEAN = {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}


def same(a, b):
    theirs, ours = weights(a), weights(b)
    return theirs.keys() == ours.keys() and all(theirs[name].equal(ours[name]) for name in theirs)


def ids(run):
    found = defaultdict(set)
    for path in (run / "audit").glob("life-*"):
        for note in map(json.loads, path.open()):
            found[note["step"]].update(note.get("ids", []))
    return found


def test_a_fork_shares_its_past_and_its_flags_and_outlives_the_run_it_has_left(jobs, tmp_path, own):  # noqa: F811
    run = train(jobs, tmp_path / "run", "--keep-every=4", *own)
    again = train(jobs, tmp_path / "again", f"--fork={run}", "--at=4", processes=2)
    assert same(run, again) and len(checkpoints(again / "checkpoints")) > 0
    fork = [f"--fork={run}", "--at=4", "--lr=0.1"]
    other = train(jobs, tmp_path / "other", *fork, "--max-steps=6")
    facts = json.loads((other / "options.json").read_text())["identity"]
    assert (facts["fork"], facts["at"], facts["lr"], facts["model"]) == (str(run), 4, 0.1, "mlp")
    shutil.rmtree(run)
    train(jobs, other, *fork, processes=2)
    assert not same(again, other) and audit(other) == CLEAN
    assert min(ids(other)) == 5 and max(ids(other)) == 10


def test_skipped_samples_are_left_out_for_good_and_the_audit_is_clean(jobs, tmp_path, own):  # noqa: F811
    run = train(jobs, tmp_path / "run", "--keep-every=4", *own)
    flags = [f"--fork={run}", "--at=4", "--skip=5:6", "--epochs=2"]
    other = train(jobs, tmp_path / "other", *flags, "--max-steps=6")
    train(jobs, other, *flags, processes=2)
    assert audit(other) == CLEAN
    theirs, ours = ids(run), ids(other)
    assert [ours[step] for step in range(5, 9)] == [theirs[step] for step in range(7, 11)]
    assert max(ours) == 18 and len(set.union(*(ours[step] for step in range(9, 19)))) == 150


@pytest.mark.parametrize("flags, words", [
    (["--at=3"], "--fork needs --at"), (["--fork=x", "--at=3"], "--fork needs --at"),
    (["--fork=nowhere", "--at=3", "--run-dir=new"], "cannot be read")])
def test_a_fork_that_lacks_something_is_refused(flags, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_options("", flags, script="ddp")
    assert words in capsys.readouterr().err


A_RUN = {"options": {"lr": 0.5}, "identity": {"lr": 0.5}}
FLIPPED = sealed(A_RUN).decode().replace("0.5", "0.7")


@pytest.mark.parametrize("text", ["[]", "null", "7", '{"options": 7}', "[" * 100_000, "{", json.dumps(A_RUN),
                                  FLIPPED], ids=lambda text: text[:9])
def test_a_fork_of_a_run_whose_options_are_damaged_is_refused(text, tmp_path, capsys):
    (tmp_path / "options.json").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parse_options("", [f"--fork={tmp_path}", "--at=3", f"--run-dir={tmp_path}/new"], script="ddp")
    assert "options.json cannot be read: options.json is damaged" in capsys.readouterr().err


def test_steps_that_are_not_there_and_a_skip_beyond_the_epoch_are_refused(jobs, tmp_path, own):  # noqa: F811
    run = train(jobs, tmp_path / "run", "--keep-every=4", *own)
    for flags, words in ((["--at=5"], "it keeps 4, 8"), (["--at=4", "--skip=6:7"], "A is N + 1"),
                         (["--at=4", "--skip=5:11"], "does not end in this epoch")):
        job = jobs.python("train_ddp.py", f"--run-dir={tmp_path}/new", f"--fork={run}", *flags)
        assert job.wait() == 2 and words in job.output, job.output
