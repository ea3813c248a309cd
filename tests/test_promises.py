"""The ten promises of README.md, in its order: real processes are started, killed, resized and damaged, and
what is left is compared with a training that nobody disturbed.

Most trainings here use the net and the data of tools/paced.py: 331 samples, 22 steps of some milliseconds,
float64 without dropout, so that any two worlds agree to 1e-9 and one sample too many would show.
"""

import pickle
import random
import shutil
import signal

import pytest
import torch
from jobs import PACED, ROOT, STEPS, TESTS, kill_at, lives, rows, steps_on_disk, until, wait_for, weights
from poisoned import Bomb
from torch.nn.functional import cross_entropy

from tests.chaos.checks import every_step_is_logged_once, nothing_is_left

CLEAN = "missed 0 repeated 0 lost 0 redone 0"
# float32 with dropout: nothing agrees by chance
BITS = (f"--model={TESTS}/paced.py:dropping", "--virtual-ranks=4")


# ---- the helper: how a training is started, and what is asked of it afterwards -------------------
def train(jobs, processes, run, *flags, script="train_ddp.py", data=PACED, **environment):
    """A training under torchrun, which starts its processes again when one of them dies."""
    return jobs.torchrun(processes, script, *data, f"--run-dir={run}", *flags, **environment)


def complete(job):
    job.ends_with(0)


def stop(job, number=signal.SIGTERM):
    """As Ctrl-C, Slurm and Kubernetes stop a job; then it can be started with another number of processes."""
    job.kill(number)
    assert job.wait() != 0


def ask(jobs, module, *words):
    """(exit code, output) of `python -m MODULE WORDS`."""
    job = jobs.start("-m", module, *words, PYTHONPATH=str(ROOT))
    return job.wait(), job.output


def audit_of(jobs, run):
    _, output = ask(jobs, "common.ledger", run, "--audit")
    return output.strip().splitlines()[-1]


def digest_of(jobs, run):
    """One hash over all tensors of the newest whole checkpoint."""
    code, output = ask(jobs, "common.checkpoint", run, "--digest")
    assert code == 0, output
    return output.split()[-1]


def assert_same_model(run, other):
    """The same weights; each step once in the log; nothing half written beside the checkpoints."""
    every_step_is_logged_once(run, STEPS)
    nothing_is_left(run)
    torch.testing.assert_close(weights(run), weights(other), rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def undisturbed_bits(warm, tmp_path_factory):
    """The run of `undisturbed` with --virtual-ranks: (run, its digest)."""
    run = tmp_path_factory.mktemp("undisturbed") / "bits"
    complete(warm.python("train_ddp.py", *PACED, *BITS, f"--run-dir={run}", PACE="0"))
    return run, digest_of(warm, run)


# ---- 1 -------------------------------------------------------------------------------------------
def test_no_sample_is_lost_or_repeated_through_any_restarts_and_any_numbers_of_processes(
    jobs, run, undisturbed
):
    job = train(jobs, 2, run)
    kill_at(job, run, 3)
    wait_for(run, 6, 1, job)
    stop(job, signal.SIGINT)
    job = train(jobs, 3, run)
    kill_at(job, run, 9, rank=0, life=2)
    wait_for(run, 12, 3, job)
    stop(job)
    job = train(jobs, 1, run)
    wait_for(run, 15, 4, job)
    stop(job)
    complete(train(jobs, 2, run))
    assert [life["world"] for life in lives(run)] == [2, 2, 3, 3, 1, 2]
    assert audit_of(jobs, run) == CLEAN
    assert_same_model(run, undisturbed)


# ---- 2 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "script, cut", [("train_ddp.py", ()), ("train_mp.py", ("--devices=cpu,cpu",))], ids=["whole", "stages"]
)
def test_no_step_that_a_survivor_has_finished_is_lost_when_a_process_dies(
    jobs, run, undisturbed, script, cut
):
    job = train(jobs, 3, run, "--save-every=1000000", "--save-seconds=0", *cut, script=script)
    for life, rank in enumerate((2, 0, 1)):
        kill_at(job, run, 4 + 5 * life, rank, life)
    complete(job)
    assert len(lives(run)) == 4
    assert audit_of(jobs, run) == CLEAN
    assert_same_model(run, undisturbed)


# ---- 3 -------------------------------------------------------------------------------------------
def test_if_all_processes_die_at_once_the_run_resumes_from_its_last_periodic_checkpoint(
    jobs, run, undisturbed
):
    every = 4
    job = train(jobs, 2, run, f"--save-every={every}")
    life = wait_for(run, 7, 0, job)
    until(lambda: steps_on_disk(run), "the first periodic save")
    for pid in (job.pid, *life["pids"]):
        jobs.kill(pid)
    job.wait()
    complete(train(jobs, 2, run, f"--save-every={every}"))
    missed, repeated, lost, redone = (int(word) for word in audit_of(jobs, run).split()[1::2])
    assert (missed, repeated) == (0, 0)
    assert lost == redone <= 2 * every  # the interval, and a save that was under way
    assert_same_model(run, undisturbed)


# ---- 4 -------------------------------------------------------------------------------------------
def test_the_model_is_the_same_bit_for_bit_at_any_world_and_stages_after_any_kills(
    jobs, run, undisturbed_bits
):
    job = train(jobs, 3, run, *BITS)
    kill_at(job, run, 5)
    wait_for(run, 9, 1, job)
    stop(job)
    job = train(jobs, 2, run, *BITS, "--devices=cpu,cpu", script="train_mp.py")
    wait_for(run, 14, 2, job)
    stop(job)
    complete(train(jobs, 4, run, *BITS))
    assert audit_of(jobs, run) == CLEAN
    assert digest_of(jobs, run) == undisturbed_bits[1]


# ---- 5 -------------------------------------------------------------------------------------------
def test_no_checkpoint_is_half_written_when_everything_dies_in_the_middle_of_saves(
    jobs, run, undisturbed_bits
):
    moment = random.Random(5)
    for life in range(5):
        job = jobs.python("train_ddp.py", *PACED, *BITS, f"--run-dir={run}", "--save-every=1", "--keep=4")
        wait_for(run, 3 + 3 * life, life, job)
        until(lambda: moment.random() < 0.1, "a moment by chance")
        job.kill()
        job.wait()
        code, output = ask(jobs, "common.checkpoint", run)
        assert code == 0 and "damaged" not in output, output
    complete(jobs.python("train_ddp.py", *PACED, *BITS, f"--run-dir={run}", "--save-every=1"))
    assert digest_of(jobs, run) == undisturbed_bits[1]


def test_a_damaged_checkpoint_is_never_used(jobs, run, undisturbed_bits):
    chance = random.Random(5)
    start = ("train_ddp.py", *PACED, *BITS, f"--run-dir={run}", "--keep=2")
    complete(jobs.python(*start, "--max-steps=18", PACE="0"))
    digest_of_older = digest_of(jobs, run)
    complete(jobs.python(*start, PACE="0"))
    older, newest = sorted((run / "checkpoints").glob("step-*"))[-2:]
    whole = {path: path.read_bytes() for path in sorted(newest.iterdir())}
    assert digest_of(jobs, run) == undisturbed_bits[1] != digest_of_older
    for path, data in whole.items():
        for bit in chance.sample(range(8 * len(data)), 6):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert digest_of(jobs, run) == digest_of_older, f"bit {bit} of {path.name}"
        path.write_bytes(data[:-1])
        assert digest_of(jobs, run) == digest_of_older, f"{path.name} is one byte short"
        path.write_bytes(data)
    path.write_bytes(b"")
    job = jobs.python(*start, PACE="0")
    complete(job)  # resumes from the older one, says so, and makes the steps since then again
    assert older.name in job.output and newest.name in job.output
    assert digest_of(jobs, run) == undisturbed_bits[1]


# ---- 6 -------------------------------------------------------------------------------------------
LINEAR = """
import torch

class Double(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.double())

def net(opts, data):
    net = Double(4, 3, dtype=torch.float64)
    torch.nn.init.constant_(net.weight, 0.25)
    torch.nn.init.constant_(net.bias, 0.5)
    return torch.nn.Sequential(net)

def points(n, seed):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()

def data():
    return *points(23, 1), *points(301, 2)
"""


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_the_gradient_is_the_mean_over_the_real_samples_and_evaluation_counts_each_sample_once(
    jobs, tmp_path, run, processes
):
    (tmp_path / "linear.py").write_text(LINEAR)
    flags = "--epochs=1 --lr=0.5 --optimizer=sgd --momentum=0 --global-batch-size=23 --no-tensorboard".split()
    own_files = ("--model=linear.py:net", "--dataset=linear.py:data")
    complete(train(jobs, processes, run, *flags, "--log-every=1", data=own_files, cwd=tmp_path))
    own = {}
    exec(LINEAR, own)
    net = own["net"](None, None)
    x, y, x_test, y_test = own["data"]()
    cross_entropy(net(x), y).backward()  # the mean over 23 samples, which no number of processes here divides
    with torch.no_grad():
        for weight in net.parameters():
            weight -= 0.5 * weight.grad
        out = net(x_test)
    torch.testing.assert_close(weights(run), dict(net.state_dict()), rtol=0, atol=1e-12)
    evaluation = rows(run)[-1]
    assert evaluation["val_acc"] == (out.argmax(1) == y_test).sum().item() / 301
    assert evaluation["val_loss"] == pytest.approx(cross_entropy(out, y_test).item(), abs=1e-9)


# ---- 7 -------------------------------------------------------------------------------------------
def test_any_segment_of_a_run_can_be_made_again_with_any_number_of_processes(jobs, run):
    flags = (*BITS, "--save-every=8", "--keep-every=8")
    job = train(jobs, 3, run, *flags)
    kill_at(job, run, 5, rank=0)
    wait_for(run, 11, 1, job)
    stop(job)
    complete(train(jobs, 2, run, *flags))
    code, output = ask(jobs, "common.replay", "verify", run, "--from", "8", "--to", "16", "--nproc", "1")
    assert code == 0 and "same" in output, output


# ---- 8 -------------------------------------------------------------------------------------------
CHEAT = """
import os
import torch

class Points(torch.utils.data.Dataset):
    classes = 2

    def __len__(self):
        return 150

    def __getitem__(self, i):
        if i == 77 and os.environ.get("CHEAT") == "sample":
            i = 78
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, int(x[0] > 0)

def data():
    return Points(), Points()

def rate(step, total, opts):
    return 2.0 if step == 1 and os.environ.get("CHEAT") == "rate" else 1.0
"""


@pytest.mark.parametrize("cheat", ["checkpoint", "rate", "sample"])
def test_a_forged_checkpoint_a_changed_rate_and_a_swapped_sample_are_found(jobs, tmp_path, run, cheat):
    (tmp_path / "cheat.py").write_text(CHEAT)
    flags = (
        "--dataset=cheat.py:data",
        "--lr-schedule=cheat.py:rate",
        "--model=mlp",
        "--epochs=1",
        "--workers=0",
        "--virtual-ranks=2",
        "--global-batch-size=50",
        "--save-every=3",
        "--no-tensorboard",
    )
    complete(jobs.python("train_ddp.py", *flags, "--run-dir=run", cwd=tmp_path, CHEAT=cheat))
    if cheat == "checkpoint":  # another run's, whose hashes are all right
        complete(jobs.python("train_ddp.py", *flags, "--run-dir=other", "--seed=1", cwd=tmp_path))
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(tmp_path / "other/checkpoints", run / "checkpoints")
    code, output = ask(jobs, "common.replay", "verify", run, "--from", "0", "--to", "3")
    assert code == 1 and "differs" in output, output


# ---- 9 -------------------------------------------------------------------------------------------
BROKEN = '''
import os
import torch

class Broken(torch.nn.Linear):
    """One bit of what the device of rank 1 computes is wrong."""
    def forward(self, x):
        out = super().forward(x)
        if os.environ.get("RANK") == "1" and os.environ.get("BROKEN"):
            out.detach().view(torch.int32).flatten()[0] ^= 1 << 20
        return out

def net(opts, data):
    return torch.nn.Sequential(Broken(6, 3))
'''


def test_a_device_that_computes_wrong_numbers_is_found_and_named(jobs, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    flags = (
        f"--model={tmp_path}/broken.py:net",
        f"--dataset={TESTS}/paced.py:data",
        "--global-batch-size=32",
        "--epochs=1",
        "--virtual-ranks=3",
        "--cross-check=2",
        "--no-tensorboard",
        f"--run-dir={tmp_path}/run",
    )
    ranks = jobs.by_hand(3, "train_ddp.py", *flags, BROKEN="1")
    named = "".join(rank.ends_with(7) for rank in ranks)
    assert "rank 1" in named and "rank 2" not in named and "rank 0" not in named, named


# ---- 10 ------------------------------------------------------------------------------------------
def test_resuming_never_runs_code_from_a_file(jobs, tmp_path, run):
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Bomb())
    start = ("train_ddp.py", *PACED)
    complete(jobs.python(*start, f"--run-dir={run}", "--save-every=9", "--max-steps=18", PACE="0"))
    newest = max((run / "checkpoints").glob("step-*"))
    for path in (*newest.iterdir(), run / "options.json", run / "ledger.jsonl", run / "metrics.jsonl"):
        copy = tmp_path / f"planted in {path.name}"
        shutil.copytree(run, copy)
        (copy / path.relative_to(run)).write_bytes(bomb)
        job = jobs.python(*start, f"--run-dir={copy}", PACE="0")
        assert job.wait() in (0, 2, 3), job.output  # the checkpoint before, or a refusal in words
        assert "Traceback" not in job.output, job.output
    file = tmp_path / "weights.pt"
    file.write_bytes(bomb)
    job = jobs.python(*start, f"--init-from={file}", f"--run-dir={tmp_path}/new")
    job.ends_with(2)
    assert not canary.exists()
    pickle.loads(bomb)
    assert canary.exists(), "a bomb that does nothing proves nothing"
