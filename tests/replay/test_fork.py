"""--fork: a run that leaves another one at a step."""

import json
import shutil

import pytest
from jobs import CLEAN, audit
from test_verify import own, train, verify, warm_starts  # noqa: F401  (three are fixtures)

from common.extras.replay import end_of
from common.options import parse_options


@pytest.mark.usefixtures("warm_starts")
def test_a_fork_shares_its_past_and_its_flags_and_outlives_the_run_it_has_left(
    jobs,
    tmp_path,
    own,  # noqa: F811
    verify,  # noqa: F811
):
    run = train(jobs, tmp_path / "run", "--keep-every=4", *own)
    again = train(jobs, tmp_path / "again", f"--fork={run}", "--at=4", processes=2)
    assert end_of(run, 10) == end_of(again, 10)
    fork = [f"--fork={run}", "--at=4", "--lr=0.1"]
    other = train(jobs, tmp_path / "other", *fork, "--max-steps=6", "--keep-every=5")
    code, said = verify(other, "--all")
    assert code == 0 and "nothing proves step 5, where it begins" in said and "1 of 1 segments" in said, said
    facts = json.loads((other / "options.json").read_text())["options"]
    assert (facts["fork"], facts["at"], facts["lr"], facts["model"]) == (str(run), 4, 0.1, "mlp")
    shutil.rmtree(run)
    train(jobs, other, *fork, processes=2)
    assert end_of(other, 10)[0] != end_of(again, 10)[0] and audit(other) == CLEAN
    notes = [json.loads(line) for path in (other / "audit").glob("*/*") for line in path.open()]
    assert {note["step"] for note in notes} == set(range(5, 11))


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--at=3"], "--fork needs --at"),
        (["--fork=x", "--at=3"], "--fork needs --at"),
        (["--fork=nowhere", "--at=3", "--run-dir=new"], "name the folder of a run"),
        (["--fork=damaged", "--at=3", "--run-dir=new"], "options.json is damaged"),
    ],
)
def test_a_fork_that_lacks_something_is_refused(flags, words, capsys, tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/options.json").write_text('{"options": {}, "identity": {}}')  # no seal
    with pytest.raises(SystemExit, match="2"):
        parse_options("", flags, script="ddp")
    assert words in capsys.readouterr().err


def test_a_step_that_is_not_there_is_refused(jobs, tmp_path, own):  # noqa: F811
    run = train(jobs, tmp_path / "run", "--keep-every=4", *own)
    said = jobs.python("train_ddp.py", f"--run-dir={tmp_path}/new", f"--fork={run}", "--at=5").ends_with(2)
    assert "no whole checkpoint of step 5" in said, said
