"""What a finished run is good for: its best checkpoint by name, its weights as a file that anybody reads."""

import importlib
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, load_model
from stores import a_life, at_step, expected, options, save, tiny_net
from torch import nn

from common.checkpoint.__main__ import main
from common.options import as_imagefolder


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight
        self.brief = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))


def trained(folder, steps=(1, 2), best=1):
    opts = options(folder)
    with a_life(opts) as life:
        for step in steps:
            at_step(life.state, step)
            if step == best:
                life.state.progress.best = {"val_acc": 0.5, "loss": 0.5, "step": best}
            save(life, step)
    return opts.run_dir


def test_the_best_checkpoint_is_printed_as_a_path(tmp_path, capsys):
    run = trained(tmp_path, steps=(1, 2, 3, 4), best=2)
    assert main([str(run), "--best"]) == 0
    assert capsys.readouterr().out == f"{run}/checkpoints/step-00000002\n"
    assert main([f"{run}/checkpoints/step-00000002"]) == 0
    assert capsys.readouterr().out.startswith("step-00000002  whole")
    assert main([str(run), "--best", "--digest"]) == 0
    assert capsys.readouterr().out.startswith("step-00000002  whole")


def test_without_an_evaluation_there_is_no_best(tmp_path, capsys):
    assert main([str(trained(tmp_path, best=None)), "--best"]) == 3
    assert "no evaluated checkpoint" in capsys.readouterr().err


def test_a_best_evaluation_without_a_checkpoint_in_this_run_gives_way_to_the_one_before(tmp_path, capsys):
    """Rank 0 has died as it saved step 2, the best, and a survivor has saved step 3; or another run."""
    run = trained(tmp_path, steps=(1, 3), best=3)
    opts = options(tmp_path)
    with a_life(options(tmp_path / "new", resume=f"{run}/checkpoints/step-00000003")) as life:
        assert life.state.progress.best == {"step": 3}
    with a_life(opts) as life:
        assert life.state.progress.best["val_acc"] == 0.5
        life.state.progress.best["step"] = 2
        save(life, 4)
    with a_life(opts, said=(said := [])) as life:
        assert "no checkpoint of step 2" in said[0]
        assert life.state.progress.best == {"val_acc": 0.5, "loss": 0.5, "step": 3}
        save(life, 5)
    assert main([str(run), "--best"]) == 0 and "step-00000003" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_neither_the_best_nor_exported(tmp_path, capsys):
    run = trained(tmp_path)
    file = tmp_path / "w.safetensors"
    model = run / "checkpoints/step-00000001/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    assert main([str(run), "--best", "--export", str(file)]) == 3 and not file.exists()
    assert main([f"{run}/checkpoints/step-00000001", "--export", str(file)]) == 3 and not file.exists()
    assert main([str(run), "--export", str(file)]) == 0 and "of step 2" in capsys.readouterr().out
    assert main([str(run)]) == 0 and "1 of 2 damaged: " in capsys.readouterr().err


def test_an_export_says_what_was_done_to_pictures(tmp_path, capsys, monkeypatch):
    run = trained(tmp_path)
    options = {"dataset": "imagefolder", "image_size": 64}
    monkeypatch.setattr("common.checkpoint.__main__.read_options", lambda run: options)
    assert main([str(run), "--export", f"{tmp_path}/w.pt"]) == 0
    assert f"\nits pictures: {as_imagefolder(64)}\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["common.checkpoint.__main__", "common.ledger.__main__", "common.replay"])
def test_every_option_of_a_command_is_in_the_text_of_its_help(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(command).main(["--help"])
    text, options = capsys.readouterr().out.split("options:")
    found = re.findall(r"^  (--\w+)", options, re.MULTILINE)
    assert len(found) > 2 and all(option in text.partition("\n\n")[2] for option in found)


def test_an_export_is_in_the_format_that_its_suffix_says_and_loads_strictly_into_the_bare_net(
    tmp_path, capsys
):
    run = trained(tmp_path)
    read = {"safetensors": load_file, "pt": partial(torch.load, weights_only=True)}
    for flags, step, suffix in (([], 2, "safetensors"), (["--best"], 1, "safetensors"), ([], 2, "pt")):
        file = tmp_path / f"w.{suffix}"
        assert main([str(run), *flags, "--export", str(file)]) == 0
        net = tiny_net()
        net.load_state_dict(read[suffix](file))
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, expected(tensor, step)), name
    capsys.readouterr()
    assert main([str(run), "--export", f"{tmp_path}/w.onnx"]) == 2
    assert "end the name in .safetensors, or in .pt" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("*w*")) == ["w.pt", "w.safetensors"]


def test_averages_take_the_place_of_the_weights_and_tied_ones_are_there_once(tmp_path, capsys):
    opts = options(tmp_path, ema_decay=0.5)
    with a_life(opts, Tied()) as life:
        at_step(life.state, 1)
        for tensor in life.state.averages.tensors.values():
            tensor.fill_(7.0)
        life.store.save()
    file = tmp_path / "w.safetensors"
    assert main([str(opts.run_dir), "--export", str(file)]) == 0
    assert "step 1, head.weight is words.weight" in capsys.readouterr().out
    found = load_file(file)
    assert "head.weight" not in found and found["norm.running_var"].tolist() == [1.0, 2.0, 3.0]
    net = Tied()
    other = Tied()
    assert load_model(net, file) == (set(), [])  # it looks for tied weights
    assert other.load_state_dict(found, strict=False).missing_keys == ["head.weight"]
    for one in (net, other):
        assert all((p == 7).all() for p in one.parameters()) and one.head.weight is one.words.weight
