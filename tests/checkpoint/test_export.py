"""What a finished run is good for: its best checkpoint by name, its weights as a file that anybody reads."""

from functools import partial

import torch
from safetensors.torch import load_file, load_model
from stores import Adapted, a_life, at_step, expected, options, save, tiny_net

from common.extras.exports import main
from common.options import as_imagefolder


def trained(folder, steps=(1, 2), best=1):
    """A run with these checkpoints, of which one was evaluated."""
    opts = options(folder)
    with a_life(opts) as life:
        for step in steps:
            at_step(life.state, step)
            if step == best:
                life.state.record_evaluation({"val_acc": 0.5, "val_loss": 0.5})
            save(life, step)
    return opts.run_dir


def asked(capsys, *words):
    """(exit code, output, errors) of python -m common.checkpoint."""
    return main([*map(str, words)]), *capsys.readouterr()


def test_the_best_checkpoint_is_printed_as_a_path(tmp_path, capsys):
    run = trained(tmp_path, steps=(1, 2, 3, 4), best=2)
    best = run / "checkpoints/step-00000002"
    assert asked(capsys, run, "--best") == (0, f"{best}\n", "")
    for words in ([best], [run, "--best", "--digest"]):
        code, output, _ = asked(capsys, *words)
        assert code == 0 and output.startswith("step-00000002  whole")
    code, _, said = asked(capsys, trained(tmp_path / "new", best=None), "--best")
    assert code == 3 and "no evaluated checkpoint" in said


def test_a_damaged_checkpoint_is_neither_the_best_nor_exported(tmp_path, capsys):
    run = trained(tmp_path)
    file = tmp_path / "w.safetensors"
    best = run / "checkpoints/step-00000001"
    model = best / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    for words in ([run, "--best"], [best]):
        assert asked(capsys, *words, "--export", file)[0] == 3 and not file.exists()
    code, output, _ = asked(capsys, run, "--export", file)
    assert code == 0 and "of step 2" in output
    code, _, said = asked(capsys, run)
    assert code == 0 and "1 of 2 damaged: " in said


def test_an_export_says_what_was_done_to_pictures(tmp_path, capsys, monkeypatch):
    run = trained(tmp_path)
    options = {"dataset": "imagefolder", "image_size": 64}
    monkeypatch.setattr("common.extras.exports.read_options", lambda run: options)
    _, output, _ = asked(capsys, run, "--export", f"{tmp_path}/w.pt")
    assert f"\nits pictures: {as_imagefolder(64)}\n" in output


def test_an_export_is_in_the_format_that_its_suffix_says_and_loads_strictly_into_the_bare_net(
    tmp_path, capsys
):
    run = trained(tmp_path)
    for words, step, suffix, read in (
        ([], 2, "safetensors", load_file),
        (["--best"], 1, "safetensors", load_file),
        ([], 2, "pt", partial(torch.load, weights_only=True)),
    ):
        file = tmp_path / f"w.{suffix}"
        assert asked(capsys, run, *words, "--export", file)[0] == 0
        net = tiny_net()
        net.load_state_dict(read(file))
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, expected(tensor, step)), name
    code, _, said = asked(capsys, run, "--export", f"{tmp_path}/w.onnx")
    assert code == 2 and "end the name in .safetensors, or in .pt" in said
    assert sorted(path.name for path in tmp_path.glob("*w*")) == ["w.pt", "w.safetensors"]


def test_averages_take_the_place_of_the_weights_and_tied_ones_are_there_once(tmp_path, capsys):
    opts = options(tmp_path, ema_decay=0.5)
    with a_life(opts, Adapted(frozen=False)) as life:
        at_step(life.state, 1)
        for tensor in life.state.averages.tensors.values():
            tensor.fill_(7.0)
        life.store.save()
    file = tmp_path / "w.safetensors"
    assert "step 1, still_too.weight is still.weight" in asked(capsys, opts.run_dir, "--export", file)[1]
    found = load_file(file)
    assert "still_too.weight" not in found and found["norm.running_var"].tolist() == [1.0, 2.0, 3.0]
    net = Adapted()
    assert load_model(net, file) == (set(), [])  # it looks for tied weights
    assert all((p == 7).all() for p in net.parameters()) and net.still_too.weight is net.still.weight
