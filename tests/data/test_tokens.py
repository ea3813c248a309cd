"""nanoGPT's train.bin: windows of a file that stays on disk, every token in each epoch."""
import json
import tracemalloc

import numpy as np
import pytest
import torch

from common.data import load_data
from common.errors import UserError
from common.options import Options
from common.world import World

ALONE = World(0, 1, 0, 1, 0, (torch.device("cpu"),), "life", 0)


def write(folder, train=1000, val=100, vocab=300, dtype="<u2", meta=True):
    """Tokens that count up from 0, modulo the vocabulary."""
    folder.mkdir(exist_ok=True)
    for name, size in (("train", train), ("val", val)):
        (np.arange(size) % vocab).astype(dtype).tofile(folder / f"{name}.bin")
    if meta:
        (folder / "meta.json").write_text(json.dumps({"vocab_size": vocab, "dtype": np.dtype(dtype).name}))
    return folder


def load(folder, length=8, **more):
    return load_data(Options(dataset=f"tokens:{length}", data_dir=str(folder), **more), ALONE)


def refusal(folder, **more):
    with pytest.raises(UserError) as caught:
        load(folder, **more)
    assert caught.value.code == 2 and len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_windows_follow_each_other_and_each_label_is_the_token_that_comes_next(tmp_path, dtype):
    data = load(write(tmp_path, train=1000, val=101, vocab=5000, dtype=dtype))
    for split, count in ((data.train, 1000), (data.test, 96)):
        x, y = split.fetch(range(len(split)))
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape
        assert x.flatten().tolist() == list(range(count)) and torch.equal(y, (x + 1) % 1000)
    assert (data.vocab, data.classes, data.sample_shape, len(data.test)) == (5000, 5000, (8,), 12)
    assert data.train.fetch([])[0].shape == (0, 8)


@pytest.mark.parametrize("size", [9, 200, 1000, 1001, 1007, 1008])
def test_an_epoch_reads_every_token_once_but_for_fewer_than_a_window_that_it_reads_twice(tmp_path, size):
    data = load(write(tmp_path, train=size, vocab=2000))
    for epoch, augment in ((0, False), (0, True), (7, True)):
        x, y = data.train.fetch(range(len(data.train)), epoch, augment)
        counts = x.flatten().bincount(minlength=size)
        assert counts.min() == 1 and counts.max() <= 2 and (counts == 2).sum() == -size % 8
        assert torch.equal(y, (x + 1) % size)


def test_in_training_the_windows_begin_elsewhere_in_each_epoch(tmp_path):
    data = load(write(tmp_path, train=1001, vocab=2000))
    begins = {int(data.train.fetch([0], epoch, True)[0][0, 0]) for epoch in range(40)}
    assert {begin % 8 for begin in begins} == set(range(8)) and len(begins) > 30
    assert torch.equal(data.train.fetch([3], 7, True)[0], load(tmp_path).train.fetch([3], 7, True)[0])
    assert torch.equal(data.test.fetch([3], 7, False)[0], data.test.fetch([3], 8, False)[0])


def test_a_file_is_never_copied_into_memory(tmp_path):
    folder = write(tmp_path, val=2000)
    with open(folder / "train.bin", "r+b") as file:
        file.truncate(2**33)                                        # 8 GiB of zeros, and a hole on the disk
    tracemalloc.start()
    try:
        data = load(folder, length=1024)
        x, _ = data.train.fetch([0, len(data.train) - 1, len(data.train) // 2], 3, True)
        assert tracemalloc.get_traced_memory()[1] < 2**27 and len(data.train) == 2**32 // 1024
    finally:
        tracemalloc.stop()
    assert x.shape == (3, 1024)


def test_the_vocabulary_comes_from_a_flag_or_from_meta_json_and_never_from_a_pickle(tmp_path):
    write(tmp_path, meta=False)
    assert load(tmp_path, vocab_size=300).vocab == 300
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert "--vocab-size" in refusal(tmp_path)
    write(tmp_path, vocab=300)
    assert load(tmp_path).fingerprint == load(tmp_path, vocab_size=300).fingerprint


@pytest.mark.parametrize("spoil, said", [
    (lambda folder: (folder / "meta.json").write_text("{"), "JSONDecodeError"),
    (lambda folder: write(folder, train=8), "empty set"),
    (lambda folder: (folder / "train.bin").write_bytes(b"123"), "multiple of the data-type size"),
    (lambda folder: (folder / "val.bin").unlink(), "val.bin")])
def test_files_that_cannot_be_read_are_said_in_three_lines(tmp_path, spoil, said):
    spoil(write(tmp_path))
    assert said in refusal(tmp_path)


def test_a_token_beyond_the_vocabulary_is_named_when_it_is_read(tmp_path):
    data = load(write(tmp_path, meta=False), vocab_size=299)
    with pytest.raises(UserError, match="train.bin holds token 299"):
        data.train.fetch([299 // 8])


def test_inputs_and_targets_share_no_memory(tmp_path):
    x, y = load(write(tmp_path)).train.fetch([2])
    wanted = y.clone()
    x[:] = 0  # a task may mask words in place
    assert torch.equal(y, wanted)


def test_a_changed_token_or_length_changes_the_fingerprint_and_another_folder_does_not(tmp_path):
    marks = {load(write(tmp_path / name, train=90_000)).fingerprint for name in ("a", "b")}
    assert len(marks) == 1
    marks.add(load(tmp_path / "a", length=9).fingerprint)
    tokens = np.memmap(tmp_path / "a/train.bin", "<u2", "r+")
    tokens[44_444] ^= 1
    tokens.flush()
    marks.add(load(tmp_path / "a").fingerprint)
    assert len(marks) == 3
