"""A run is its options and its data: what contradicts them is refused with both values."""

import json
import os
import shutil
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import pytest
import torch
from refusals import refusal
from stores import a_life, is_at, options, refused, resumes_at, save, two_checkpoints

from common.checkpoint import reader
from common.checkpoint.__main__ import main
from common.extras.rules import check_files
from common.sealed import sealed
from common.store import identity
from common.world import fingerprint_of
from common.world.world import BLOCK_WORDS


def test_a_folder_in_which_nothing_was_saved_is_bound_to_nothing(tmp_path):
    opts = options(tmp_path)
    with a_life(opts) as life:
        assert life.store.rescue() == ""  # its first batch fails, say
    with a_life(options(tmp_path, seed=2), fingerprint="0" * 64) as life:
        save(life, 1)
    refused(opts, "--seed was 2, now 0")
    os.rename(opts.run_dir / "checkpoints/step-00000001", opts.run_dir / "checkpoints/damaged-step-00000001")
    refused(opts, "--seed was 2, now 0")  # what is put aside was saved all the same


def test_a_checkpoint_of_another_run_is_no_damage_and_is_refused(tmp_path):
    opts, root = two_checkpoints(tmp_path, steps=(1,))
    _, others = two_checkpoints(tmp_path / "other", steps=(9,), seed=3, lr=0.5)
    shutil.copytree(others / "step-00000009", root / "step-00000009")
    text = refused(opts, "step-00000009 is of another run than .*options.json")
    assert "move it away" in text and sorted(os.listdir(root)) == ["step-00000001", "step-00000009"]
    shutil.rmtree(root / "step-00000009")
    assert resumes_at(opts, 1)


def test_a_checkpoint_of_another_run_that_would_be_deleted_is_refused_and_one_kept_for_ever_if_it_is_loaded(
    tmp_path, monkeypatch
):
    """A start reads few of the many that --keep-every keeps."""
    opts, root = two_checkpoints(tmp_path, steps=(4, 5, 6, 8), keep=9, keep_every=2)
    _, others = two_checkpoints(tmp_path / "other", steps=(2, 3), seed=3, lr=0.5)
    shutil.copytree(others / "step-00000002", root / "step-00000002")
    read = []
    real = reader.read_manifest
    for module in (reader, identity):
        monkeypatch.setattr(module, "read_manifest", lambda folder: read.append(folder.name) or real(folder))
    assert resumes_at(opts, 8)
    assert {*read} == {"step-00000008", "step-00000005"}
    shutil.copytree(others / "step-00000003", root / "step-00000003")
    refused(opts, "step-00000003 is of another run than")
    shutil.rmtree(root / "step-00000003")
    for step in (4, 5, 6, 8):
        (root / f"step-0000000{step}/model.safetensors").write_bytes(b"")
    refused(opts, "step-00000002 is of another run\nmove it away")
    assert len([*root.glob("step-*")]) == 5


def test_a_checkpoint_of_this_run_that_is_not_its_newest_cannot_be_resumed_from(tmp_path):
    _, root = two_checkpoints(tmp_path)
    with refusal("resumes from its newest checkpoint\n.*--run-dir"):
        check_files(options(tmp_path, resume=f"{root}/step-00000001"))
    assert resumes_at(options(tmp_path / "other", resume=f"{root}/step-00000001"), 1)


@pytest.mark.parametrize("number", [1, 5, 6, 9])
def test_a_checkpoint_of_another_format_is_refused_in_three_lines_and_nothing_is_touched(tmp_path, number):
    """Formats 1 and 2 were written by earlier versions; 1 is what the first one with a README has left."""
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).with_name("old_run"), run)
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["seal"]
        manifest["format"] = number
        # up to 6 each value had a line
        path.write_bytes(sealed(manifest) if number > 7 else json.dumps(manifest, indent=1).encode())

    def files():
        return {
            path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (*run.rglob("*.*"), run / "lock")
        }

    before = files()
    text = refused(options(tmp_path), f"step-00000003 has format {number}, this code reads 7")
    assert "another --run-dir" in text
    refused(options(tmp_path / "new", resume=str(run)), f"step-00000003 has format {number}")
    assert main([str(run), "--digest"]) == 2
    assert files() == before


def test_a_torn_or_lost_options_json_is_made_again_and_never_passes_for_another_run(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    path = opts.run_dir / "options.json"
    data = path.read_bytes()
    for bit in range(0, len(data) * 8, 331):
        path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        refused(replace(opts, seed=1), "could be another run")
    path.write_bytes(data[:50])
    refused(opts, "data's fingerprint was ffffffffffff, now eeee", fingerprint="e" * 64)
    for damage in (lambda: path.write_bytes(data[:50]), path.unlink):
        damage()
        with a_life(opts, said=(said := [])) as life:
            assert is_at(life.state, 2)
        assert path.read_bytes() == data
        assert "made again from the newest checkpoint" in "".join(said), said
    path.unlink()
    for manifest in root.glob("*/manifest.json"):
        manifest.unlink()
    refused(opts, "No such file or directory; without it this could be another run")


def test_the_way_to_a_users_file_does_not_count(tmp_path, monkeypatch):
    own = tmp_path / "sub/own.py"
    own.parent.mkdir()
    own.write_text("one = 1")
    monkeypatch.chdir(own.parent)
    for number, spelled in enumerate(("own.py", own, "./own.py")):
        with a_life(options(tmp_path, model=f"{spelled}:net")) as life:
            assert life.state.progress.step == number
            save(life, number + 1)
    refused(options(tmp_path, model="other.py:net"), "--model was '.*own.py:net', now 'other.py:net'")


def test_what_does_not_decide_the_result_may_change_and_options_json_has_its_newest_value(tmp_path):
    two_checkpoints(tmp_path)
    for epochs in (7, 9):
        changed = {"max_steps": 7, "save_every": 3, "keep": 5, "log_every": 1, "data_dir": "elsewhere"}
        with a_life(options(tmp_path, epochs=epochs, **changed)) as life:
            assert is_at(life.state, 2)
            assert json.loads((tmp_path / "run/options.json").read_text())["options"]["epochs"] == epochs


# ---- the sum over weights -------------------------------------------------------------------------
def flipped(tensor, *bits):
    changed = tensor.contiguous().view(-1).view(torch.uint8).clone()
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return changed.view(tensor.dtype).view(tensor.shape)


def test_every_flipped_bit_and_every_swap_between_tensors_changes_the_sum():
    kinds = (torch.bfloat16, torch.bool, torch.int64, torch.float32)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = [*(torch.randn(3, 5).to(kind) for kind in kinds), torch.zeros(0), image, torch.tensor(3)]
    whole = fingerprint_of(tensors)
    for i, tensor in enumerate(tensors):
        for bit in range(tensor.nbytes * 8):
            changed = [*tensors[:i], flipped(tensor, bit), *tensors[i + 1 :]]
            assert fingerprint_of(changed) != whole, (i, bit)
    assert fingerprint_of([tensors[1], tensors[0], *tensors[2:]]) != whole
    assert torch.tensor([whole]).item() == whole


def test_every_exchange_of_two_words_and_every_two_flipped_bits_change_the_sum():
    words = torch.arange(24)  # as a permutation in a buffer
    for i, j in combinations(range(24), 2):
        exchanged = words.clone()
        exchanged[[i, j]] = words[[j, i]]
        assert fingerprint_of([exchanged]) != fingerprint_of([words]), (i, j)
    for ones in (torch.ones(3), torch.ones(2).double(), torch.ones(2).long()):
        for bits in combinations(range(8 * ones.nbytes), 2):
            assert fingerprint_of([flipped(ones, *bits)]) != fingerprint_of([ones]), bits


def test_the_sum_sees_rows_in_another_order_and_signs_also_of_a_tensor_of_several_blocks():
    rows = torch.randn(3, BLOCK_WORDS)  # 8-byte words: one block and a half
    assert len({fingerprint_of([rows[list(order)]]) for order in permutations(range(3))}) == 6
    signs = torch.ones(2 * BLOCK_WORDS, dtype=torch.float64)
    for i, j in ((0, 1), (BLOCK_WORDS - 1, BLOCK_WORDS), (5, BLOCK_WORDS + 5)):
        turned = signs.clone()
        turned[[i, j]] = -1.0
        assert fingerprint_of([turned]) != fingerprint_of([signs]), (i, j)


def test_the_sum_does_not_depend_on_where_or_how_a_tensor_lies():
    whole = torch.randn(101)
    for start in range(4):
        part = whole[start : start + 64]
        assert fingerprint_of([part]) == fingerprint_of([part.clone()])
    image = torch.randn(2, 3, 4, 5)
    assert fingerprint_of([image]) == fingerprint_of([image.to(memory_format=torch.channels_last)])
