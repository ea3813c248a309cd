"""A run is its options and its data: what contradicts them is refused with both values."""

import json
import os
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from refusals import refusal
from stores import a_life, is_at, options, refused, resumes_at, save, steps_of, two_checkpoints

from common.extras.exports import main
from common.extras.rules import check_files
from common.sealed import sealed
from common.world import fingerprint_of
from common.world.world import BLOCK_WORDS


def test_a_folder_in_which_nothing_was_saved_is_bound_to_nothing(tmp_path, opts):
    with a_life(opts) as life:
        assert life.store.rescue() == ""  # its first batch fails, say
    _, root = two_checkpoints(tmp_path, steps=(1,), seed=2)
    refused(opts, "--seed was 2, now 0")
    os.rename(root / "step-00000001", root / "damaged-step-00000001")
    refused(opts, "--seed was 2, now 0")  # what is put aside was saved all the same


def test_a_checkpoint_of_another_run_is_no_damage_and_is_refused(tmp_path):
    opts, root = two_checkpoints(tmp_path, steps=(1,))
    _, others = two_checkpoints(tmp_path / "other", steps=(9,), seed=3, lr=0.5)
    shutil.copytree(others / "step-00000009", root / "step-00000009")
    refused(opts, "step-00000009 is of another run than .*options.json\nmove it away")
    assert steps_of(opts) == [9, 1]
    shutil.rmtree(root / "step-00000009")
    assert resumes_at(opts, 1)


def test_a_checkpoint_of_another_run_that_would_be_deleted_is_refused_and_one_kept_for_ever_if_it_is_loaded(
    tmp_path,
):
    """A start does not read the many that --keep-every keeps."""
    opts, root = two_checkpoints(tmp_path, steps=(4, 5, 6), keep=9, keep_every=2)
    _, others = two_checkpoints(tmp_path / "other", seed=3, lr=0.5)
    shutil.copytree(others / "step-00000002", root / "step-00000002")
    assert resumes_at(opts, 6)
    shutil.copytree(others / "step-00000001", root / "step-00000001")
    refused(opts, "step-00000001 is of another run than")
    shutil.rmtree(root / "step-00000001")
    for step in (4, 5, 6):
        os.truncate(root / f"step-0000000{step}/model.safetensors", 0)
    refused(opts, "step-00000002 is of another run\nmove it away")
    assert steps_of(opts) == [6, 5, 4, 2]


def test_a_checkpoint_of_this_run_that_is_not_its_newest_cannot_be_resumed_from(tmp_path):
    _, root = two_checkpoints(tmp_path)
    with refusal("resumes from its newest checkpoint\n.*--run-dir"):
        check_files(options(tmp_path, resume=f"{root}/step-00000001"))
    assert resumes_at(options(tmp_path / "other", resume=f"{root}/step-00000001"), 1)


@pytest.mark.parametrize("number", [1, 6, 9])
def test_a_checkpoint_of_another_format_is_refused_in_three_lines_and_nothing_is_touched(
    tmp_path, opts, number
):
    """Formats 1 and 2 were written by earlier versions; 1 is what the first one with a README has left."""
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).with_name("old_run"), run)
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["seal"]
        manifest["format"] = number
        # up to 6 each value had a line
        path.write_bytes(sealed(manifest) if number > 7 else json.dumps(manifest, indent=1).encode())

    lock = run / "lock"

    def files():
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (*run.rglob("*.*"), lock)}

    before = files()
    said = f"step-00000003 has format {number}, this code reads 7(.|\n)*another --run-dir"
    refused(opts, said)
    refused(options(tmp_path / "new", resume=str(run)), said)
    assert main([str(run), "--digest"]) == 2
    assert files() == before


def test_a_torn_or_lost_options_json_is_made_again_and_never_passes_for_another_run(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    path = opts.run_dir / "options.json"
    data = path.read_bytes()
    for at in range(0, len(data), 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        refused(replace(opts, seed=1), "could be another run")
    path.write_bytes(data[:50])
    refused(opts, "data's fingerprint was ffffffffffff, now eeee", fingerprint="e" * 64)
    for lose in (lambda: path.write_bytes(data[:50]), path.unlink):
        lose()
        with a_life(opts) as life:
            assert is_at(life.state, 2)
        assert path.read_bytes() == data
        assert "made again from the newest checkpoint" in "".join(life.said)
    path.unlink()
    for manifest in root.glob("*/manifest.json"):
        manifest.unlink()
    refused(opts, "No such file or directory; without it this could be another run")


def test_the_way_to_a_users_file_does_not_count(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("one = 1")
    for step, spelled in enumerate(("own.py", own, "./own.py"), 1):
        with a_life(options(tmp_path, model=f"{spelled}:net")) as life:
            save(life, step)
    refused(options(tmp_path, model="other.py:net"), "--model was '.*own.py:net', now 'other.py:net'")


def test_what_does_not_decide_the_result_may_change_and_options_json_has_its_newest_value(tmp_path):
    two_checkpoints(tmp_path)
    changed = {"max_steps": 7, "save_every": 3, "keep": 5, "data_dir": "elsewhere", "epochs": 9}
    assert resumes_at(options(tmp_path, **changed), 2)
    kept = json.loads((tmp_path / "run/options.json").read_text())["options"]
    assert changed.items() <= kept.items()


# ---- the sum over weights -------------------------------------------------------------------------
def flipped(tensor, *bits):
    changed = tensor.contiguous().view(-1).view(torch.uint8).clone()
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return changed.view(tensor.dtype).view(tensor.shape)


def exchanged(words, i, j):
    order = torch.arange(len(words))
    order[[i, j]] = order[[j, i]]
    return words[order]


def test_every_flipped_bit_and_every_exchange_changes_the_sum_wherever_and_however_a_tensor_lies():
    tensors = [torch.randn(3, 5).bfloat16(), torch.ones(15).bool(), torch.zeros(0), torch.tensor(3)]
    whole = fingerprint_of(tensors)
    for i, tensor in enumerate(tensors):
        for bit in range(tensor.nbytes * 8):
            changed = [*tensors[:i], flipped(tensor, bit), *tensors[i + 1 :]]
            assert fingerprint_of(changed) != whole, (i, bit)
    assert fingerprint_of([tensors[1], tensors[0], *tensors[2:]]) != whole
    image = torch.randn(2, 3, 4, 5)[:, :, 1:]
    for same in (image.clone(), image.to(memory_format=torch.channels_last)):
        assert fingerprint_of([image]) == fingerprint_of([same])


def test_every_two_changes_change_the_sum_also_of_several_blocks():
    rows = torch.randn(3, BLOCK_WORDS)  # 8-byte words: one block and a half
    for words in (torch.arange(24), rows):  # as a permutation in a buffer
        for i, j in combinations(range(len(words)), 2):
            assert fingerprint_of([exchanged(words, i, j)]) != fingerprint_of([words]), (i, j)
    ones = torch.ones(2, dtype=torch.float64)
    for bits in combinations(range(128), 2):
        assert fingerprint_of([flipped(ones, *bits)]) != fingerprint_of([ones]), bits
    signs = torch.ones(2 * BLOCK_WORDS, dtype=torch.float64)
    for i, j in ((0, 1), (BLOCK_WORDS - 1, BLOCK_WORDS), (5, BLOCK_WORDS + 5)):
        turned = flipped(signs, 64 * i + 63, 64 * j + 63)
        assert fingerprint_of([turned]) != fingerprint_of([signs]), (i, j)
