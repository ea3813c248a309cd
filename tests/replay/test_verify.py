"""verify: a run of many lives and worlds is made again by one process; forged or cheated, it is found."""
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from jobs import TESTS, events, wait_for

from common.checkpoint.files import sealed
from common.errors import UserError
from common.ledger import Ledger
from common.options import Options
from common.replay.__main__ import main
from common.replay.run import Run

OWN = '''
import os
import torch

class Points(torch.utils.data.Dataset):
    classes = 2

    def __len__(self):
        return 150

    def __getitem__(self, i):
        if i == 77 and os.environ.get("CHEAT"):
            i = 78                              # a swapped sample
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, int(x[0] > 0)

def data():
    return Points(), Points()

def rate(step, total, opts):
    return 2.0 if step == 4 and os.environ.get("CHEAT") else 1.0
'''
FLAGS = ["--virtual-ranks=4", "--global-batch-size=16", "--workers=0", "--no-tensorboard", "--log-every=1",
         "--audit", "--keep=2", "--digest-every=1"]
pytestmark = pytest.mark.usefixtures("warm_starts")


def train(jobs, run, *flags, processes=1, **env):
    flags = [f"--run-dir={run}", *FLAGS, *flags]
    job = jobs.torchrun(processes, "train_ddp.py", *flags, **env) if processes > 1 else \
        jobs.python("train_ddp.py", *flags, **env)
    assert job.wait() == 0, job.output
    return run


@pytest.fixture
def warm_starts(jobs, monkeypatch):
    """The scripts that replay starts are forked from the warm process, too.

    With its own imports: `test_a_prompt_has_net_batch_and_state`.
    """
    def run(command, stdout):
        env, path, python, *words = map(str, command)
        assert (env, python, stdout) == ("env", sys.executable, subprocess.DEVNULL)
        if words[:2] == ["-m", "torch.distributed.run"]:
            words[:2] = ["torchrun"]
        job = jobs.start(*words, **dict([path.split("=")]))
        code = job.wait()
        print(job.output if code else "", file=sys.stderr)
        return SimpleNamespace(returncode=code)

    for module in ("run", "diff"):
        monkeypatch.setattr(f"common.replay.{module}.subprocess",
                            SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))


def replay(capsys, *arguments):
    """(exit code, output) of python -m common.replay."""
    code, said = main([str(argument) for argument in arguments]), capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("words", [
    "verify RUN --segments 0", "verify RUN --all --segments 2", "verify RUN --from -1",
    "verify RUN --nproc 0",
    "verify RUN --tolerance nan", "verify RUN --tolerance -1", "step RUN 3 --dump nowhere/x"])
def test_numbers_that_mean_nothing_and_a_dump_into_no_folder_are_refused(words, capsys):
    try:
        code = main(words.split())
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and "options.json" not in said, said


def rows(output):
    """{(begin, end): result} of the table."""
    found = {}
    for line in output.splitlines():
        words = line.split()
        if len(words) > 4 and words[1] == "to":
            found[int(words[0]), int(words[2])] = " ".join(words[5:])
    return found


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return [f"--dataset={path}:data", "--model=mlp", "--epochs=1", f"--lr-schedule={path}:rate"]


def test_a_run_of_three_lives_and_worlds_is_the_same_when_one_process_makes_it_again(jobs, tmp_path, capsys):
    run = tmp_path / "run"
    flags = [f"--run-dir={run}", *FLAGS, "--keep-every=8", f"--model={TESTS}/paced.py:dropping", "--epochs=2",
             f"--dataset={TESTS}/paced.py:data", "--global-batch-size=32"]
    for number, processes in enumerate((2, 3)):
        job = jobs.torchrun(processes, "train_ddp.py", *flags, PACE="0.05", restarts=0)
        jobs.kill(wait_for(run, 5 + 6 * number, number, job)["pids"][0])
        assert job.wait() != 0
    assert jobs.python("train_ddp.py", *flags, PACE="0").wait() == 0
    assert [life["world"] for life in events(run, "life")] == [2, 3, 1]
    code, output = replay(capsys, "verify", run, "--all")
    assert code == 0 and set(rows(output).values()) == {"same"} and (0, 8) in rows(output), output
    facts = json.loads((run / "certificate.json").read_text())
    assert facts["options"]["virtual_ranks"] == 4 and facts["tolerance"] == 0 and len(facts["torch"]) == 2
    assert all(row["digest"] == row["again"] for row in facts["segments"])


def test_a_changed_rate_and_a_swapped_sample_are_found_in_their_segments(jobs, tmp_path, own, capsys):
    run = train(jobs, tmp_path / "run", "--keep-every=3", *own, CHEAT="1")
    notes = [json.loads(line) for path in (run / "audit").glob("life-*") for line in path.open()]
    swapped = next(note["step"] for note in notes if 77 in note.get("ids", []))
    code, output = replay(capsys, "verify", run, "--all")
    wrong = {segment: result for segment, result in rows(output).items() if result != "same"}
    assert code == 1 and set(wrong) == {(a, b) for a, b in rows(output) if a < 5 <= b or a < swapped <= b}
    assert all("from step" in result for result in wrong.values()), output
    assert "from step 5 at the latest" in wrong[3, 6]


def test_a_forged_checkpoint_with_valid_hashes_is_found(jobs, tmp_path, own, capsys):
    run = train(jobs, tmp_path / "run", "--keep-every=3", *own)
    other = train(jobs, tmp_path / "other", "--keep-every=3", "--seed=1", *own)
    shutil.rmtree(run / "checkpoints/step-00000003")
    shutil.copytree(other / "checkpoints/step-00000003", run / "checkpoints/step-00000003")
    code, output = replay(capsys, "verify", run, "--from", "0", "--to", "3")
    assert code == 1 and rows(output)[0, 3].startswith("differs: "), output
    (run / "checkpoints/step-00000003/model.safetensors").write_bytes(b"")
    code, output = replay(capsys, "verify", run, "--all")
    assert code == 2 and "damaged" in output, output


def test_without_virtual_ranks_it_compares_within_a_tolerance_and_says_so(jobs, tmp_path, own, capsys):
    run = train(jobs, tmp_path / "run", "--keep-every=5", *own, "--virtual-ranks=0", processes=2)
    code, output = replay(capsys, "verify", run, "--from", "5")
    assert code == 0 and "up to 0.001 of a tensor's largest value" in output, output


@pytest.mark.parametrize("script, flags", [
    ("train_mp.py", ["--model=gpt:1x2x16", "--dataset=text:16", "--stages=2", "--max-steps=4",
                     "--data-dir=story.txt"]),
    ("train_ddp.py", ["--model=net", "--dataset=digits", "--max-steps=4"])], ids=["gpt in stages", "cnn"])
def test_a_gpt_in_stages_and_a_cnn_are_made_again_by_train_ddp(jobs, tmp_path, capsys, script, flags):
    run = tmp_path / "run"
    (tmp_path / "story.txt").write_text("Once upon a time. " * 200)
    flags = [flag.replace("story", f"{tmp_path}/story") for flag in flags]
    flags = [flag for flag in FLAGS if "digest" not in flag and "workers" not in flag] + flags
    job = jobs.torchrun(2, script, f"--run-dir={run}", "--keep-every=2", *flags)
    assert job.wait() == 0, job.output
    code, output = replay(capsys, "verify", run, "--all")
    assert code == 0 and rows(output) == {(0, 2): "same", (2, 4): "same"}, output


def test_what_cannot_be_verified_is_said_in_words(tmp_path):
    with pytest.raises(UserError, match="no whole options.json"):
        Run(tmp_path)


def test_a_digest_whose_line_is_damaged_is_not_compared(tmp_path):
    options = Options(script="ddp").to_json()
    (tmp_path / "options.json").write_bytes(sealed({"options": options, "identity": {}}))
    ledger, good = Ledger(tmp_path), {"step": 3, "model": 1, "optimizer": 2}
    ledger.event("life", life="aa", world=1, step=0)
    for damage in ({"step": None}, {"step": []}, {"model": "x"}, {"optimizer": None}, {}):
        ledger.event("digest", **good | damage)
    assert Run(tmp_path).digests == {3: (1, 2)}
