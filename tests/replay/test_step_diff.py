"""step and diff: what happened in one step, and where two runs part."""
import json
import shutil
import subprocess
import sys

import pytest
import torch
from jobs import ROOT
from test_verify import FLAGS, OWN, replay, train, warm_starts  # noqa: F401  (warm_starts is a fixture)

POISON = OWN.replace("if i == 77", "if i == 77 and False").replace(
    "return x, int", "x = x * 1e4 if i == 31 else x\n        return x, int") + '''

def narrow(opts, data):
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def dropping(opts, data):
    return torch.nn.Sequential(*narrow(opts, data)[:2], torch.nn.Dropout(), torch.nn.Linear(8, 2))
'''
KEPT = ["--keep-every=4", "--epochs=1"]
pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(POISON)
    return path


def meets(run, sample):
    """The step that was trained on a sample, as the audit tells."""
    notes = [json.loads(line) for path in (run / "audit").glob("life-*") for line in path.open()]
    return next(note["step"] for note in notes if sample in note.get("ids", []))


def test_a_poisoned_sample_is_the_first_that_step_names(jobs, tmp_path, own, capsys):
    run = train(jobs, tmp_path / "run", *KEPT, f"--dataset={own}:data", f"--model={own}:narrow")
    step = meets(run, 31)
    code, output = replay(capsys, "step", run, step, "--dump", tmp_path / "dump.pt")
    assert code == 0 and output.startswith(f"step {step}: epoch 1, position {16 * step - 16}, "), output
    samples = [line for line in output.splitlines() if line.startswith("sample ")]
    assert samples[0].startswith("sample 31: loss ") and "class " in samples[0], output
    kept = torch.load(tmp_path / "dump.pt", weights_only=True)
    assert len(kept["slices"]) == 4
    assert set(kept["slices"][0]["gradients"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {"", "0", "1", "2"} == set(kept["slices"][0]["outputs"])
    largest = max(kept["slices"], key=lambda each: max(g.norm() for g in each["gradients"].values()))
    assert 31 in largest["ids"]


OTHER = '''
import torch
from torch.nn import functional as F

class Points(torch.utils.data.Dataset):
    def __init__(self, n):
        self.samples = torch.linspace(0, 1, 3 * n).view(n, 3)       # no list of files

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i], 2 * self.samples[i]

def data():
    return Points(60), Points(10)

def net(data):
    return torch.nn.Linear(3, 3)

def loss(net, batch):
    return {"loss": (F.mse_loss(net(batch[0]), batch[1], reduction="sum"), len(batch[1]))}
'''


@pytest.mark.parametrize("kind", ["text", "vectors"])
def test_step_tells_of_samples_without_one_class_each(jobs, tmp_path, capsys, kind):
    own = tmp_path / "other.py"
    own.write_text(OTHER)
    flags = {"text": ["--model=gpt:1x2x16", "--dataset=text:16", f"--data-dir={own}"],
             "vectors": [f"--model={own}:net", f"--dataset={own}:data", f"--task={own}:loss"]}[kind]
    run = train(jobs, tmp_path / "run", "--keep-every=2", "--max-steps=2", *flags)
    code, output = replay(capsys, "step", run, 2)
    assert code == 0 and "sample " in output and "class" not in output, output


def test_the_state_that_step_rebuilds_is_that_of_the_run(jobs, tmp_path, own, capsys):
    run = train(jobs, tmp_path / "run", *KEPT, "--keep-every=1", f"--dataset={own}:data",
                f"--model={own}:dropping", processes=2)
    shutil.rmtree(run / "checkpoints/step-00000006")
    from safetensors.torch import load_file
    theirs = load_file(run / "checkpoints/step-00000007/model.safetensors")
    shutil.rmtree(run / "checkpoints/step-00000007")
    assert replay(capsys, "step", run, 8, "--dump", tmp_path / "dump.pt")[0] == 0
    ours = torch.load(tmp_path / "dump.pt", weights_only=True)["state"]["model"]
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_prompt_has_net_batch_and_state(jobs, tmp_path, own):
    run = train(jobs, tmp_path / "run", *KEPT, f"--dataset={own}:data", f"--model={own}:narrow")
    done = subprocess.run([sys.executable, "-m", "common.replay", "step", run, "3", "--break"], cwd=ROOT,
                          text=True, input="print(state.step, batch.size, len(list(net)))\n",
                          capture_output=True, timeout=60)
    assert done.returncode == 0 and "2 16 3\n" in done.stdout, done.stdout + done.stderr


def test_two_runs_that_are_the_same_are_so(jobs, tmp_path, own, capsys):
    runs = [train(jobs, tmp_path / name, *KEPT, f"--dataset={own}:data", "--model=mlp", processes=count)
            for count, name in enumerate("ab", 1)]
    code, output = replay(capsys, "diff", *runs)
    assert code == 0 and output.endswith("the two runs are the same up to step 10\n"), output
    assert output.count(f": torch {torch.__version__}") == 2


def test_a_changed_line_of_a_net_is_located_in_its_module(jobs, tmp_path, own, capsys):
    """The line takes effect in the step that meets the poisoned sample."""
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    net = POISON + '''

class Late(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) SCALE

def late(opts, data):
    return torch.nn.Sequential(torch.nn.Linear(6, 8), Late(), torch.nn.Linear(8, 2))
'''
    a.write_text(net.replace("SCALE", "* 1.0"))
    b.write_text(net.replace("SCALE", "* (1.0 if x.abs().max() < 100 else 1.5)"))
    runs = [train(jobs, tmp_path / path.stem, *KEPT, f"--dataset={own}:data", f"--model={path}:late")
            for path in (a, b)]
    code, output = replay(capsys, "diff", *runs)
    assert code == 1 and f"step {meets(runs[0], 31)}, slice " in output, output
    assert "outputs: 1 differs" in output, output


def test_code_of_another_folder_is_named_and_found(jobs, tmp_path, own, capsys):
    house = tmp_path / "house"
    shutil.copytree(ROOT / "common", house / "common", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train_ddp.py", house)
    path = house / "common/training/state.py"
    text = path.read_text()
    changed = text.replace("            self.step += 1\n", "            self.step += 1\n"
                           "            next(iter(self.names)).data.mul_(1.5 if self.step == 5 else 1.0)\n")
    assert changed != text
    path.write_text(changed)
    flags = [*FLAGS, *KEPT, f"--dataset={own}:data", "--model=mlp"]
    ours = train(jobs, tmp_path / "ours", *flags)
    job = jobs.start(house / "train_ddp.py", f"--run-dir={tmp_path}/theirs", *flags, cold=True)
    assert job.wait() == 0, job.output
    code, output = replay(capsys, "diff", ours, tmp_path / "theirs")
    assert code == 1 and "one was made by other code" in output, output
    code, output = replay(capsys, "diff", ours, tmp_path / "theirs", "--with-b", f":{house}")
    assert code == 1 and "step 5: the same gradients, but another update" in output, output
