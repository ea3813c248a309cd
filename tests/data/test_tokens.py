"""nanoGPT's train.bin: windows of a file that stays on disk, each token once an epoch."""
import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from common.data import batches, load_data
from common.errors import UserError
from common.options import Options
from common.sampler import ElasticSampler
from common.world import World

ALONE = World(0, 1, 0, 1, 0, (torch.device("cpu"),), "life", 0)
HOUSE = Path(__file__).parents[2]


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
    data = load(write(tmp_path, train=1001, vocab=5000, dtype=dtype))
    x, y = data.train.fetch(range(len(data.train)))
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (125, 8)
    assert x.flatten().tolist() == list(range(1000)) and torch.equal(y, x + 1)
    assert (data.vocab, data.classes, data.sample_shape, len(data.test)) == (5000, 5000, (8,), 12)
    assert data.train.fetch([])[0].shape == (0, 8)


def test_in_training_the_windows_begin_elsewhere_in_each_epoch_and_read_every_token_once(tmp_path):
    data, begins = load(write(tmp_path, train=1001, vocab=2000)), set()
    for epoch in range(40):
        x, y = data.train.fetch(list(range(125)), epoch, True)
        read = x.flatten().sort().values
        assert len(read.unique()) == 1000 and read.max() <= 1000        # of a ring of 1001
        assert torch.equal(y, (x + 1) % 1001)
        begins |= set((x[:, 0] % 8).tolist())
    assert begins == set(range(8))
    assert torch.equal(data.train.fetch([3], 7, True)[0], load(tmp_path).train.fetch([3], 7, True)[0])
    assert torch.equal(data.test.fetch([3], 7, False)[0], data.test.fetch([3], 8, False)[0])


def test_a_batch_is_the_same_at_any_world(tmp_path):
    opts = Options(dataset="tokens:8", data_dir=str(write(tmp_path)))
    data = load_data(opts, ALONE)
    alone = list(batches(data.train, ElasticSampler(data.train, 10), opts))
    halves = [list(batches(data.train, ElasticSampler(data.train, 10, rank, 2), opts)) for rank in range(2)]
    for whole, left, right in zip(alone, *halves, strict=True):
        assert torch.equal(whole.x, torch.cat([left.x, right.x])) and whole.ids == left.ids + right.ids


def test_a_file_is_never_copied_into_memory(tmp_path):
    folder = write(tmp_path, val=2000)
    with open(folder / "train.bin", "r+b") as file:
        file.truncate(2**33)                                        # 8 GiB of zeros, and a hole on the disk
    tracemalloc.start()
    try:
        data = load(folder, length=1024)
        x, _ = data.train.fetch([0, len(data.train) - 1, len(data.train) // 2], 3, True)
        assert tracemalloc.get_traced_memory()[1] < 2**27 and len(data.train) == (2**32 - 1) // 1024
    finally:
        tracemalloc.stop()
    assert x.shape == (3, 1024)


def test_the_vocabulary_comes_from_a_flag_or_from_meta_json_and_never_from_a_pickle(tmp_path):
    write(tmp_path, meta=False)
    assert load(tmp_path, vocab_size=300).vocab == 300
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    said = refusal(tmp_path)
    assert "meta.pkl is a pickle, and is not opened" in said and "--vocab-size" in said
    write(tmp_path, vocab=300)
    assert load(tmp_path).fingerprint == load(tmp_path, vocab_size=300).fingerprint
    assert "--vocab-size 299, but" in refusal(tmp_path, vocab_size=299)
    odd = '{"vocab_size": "many"}', '{"vocab_size": 9, "dtype": "float32"}', '{"vocab_size": true}'
    for text in ("[1]", "{", '{"vocab_size": 9, "dtype": ["uint16"]}', *odd):
        (tmp_path / "meta.json").write_text(text)
        refusal(tmp_path)


def test_a_token_beyond_the_vocabulary_is_named_at_the_start_or_when_it_is_read(tmp_path):
    write(tmp_path, train=20_000_000, meta=False)
    assert "holds token 299, but the vocabulary has 299" in refusal(tmp_path, vocab_size=299)
    tokens = np.memmap(tmp_path / "train.bin", "<u2", "r+")
    tokens[50_000] = 301                                            # where nothing looks at the start
    tokens.flush()
    data = load(tmp_path, vocab_size=300)
    with pytest.raises(UserError, match="train.bin holds token 301, but the vocabulary has 300"):
        data.train.fetch([50_000 // 8])


@pytest.mark.parametrize("vocab, dtype, meta, said", [
    (300, "<u4", False, 'write {"dtype": "uint32"'),
    (300, "<u4", {"vocab_size": 300}, 'write {"dtype": "uint32"'),
    (300, "<u2", {"vocab_size": 300, "dtype": "uint32"}, "but the vocabulary has 300"),
    (70_000, "<u2", {"vocab_size": 70_000}, "but the vocabulary has 70,000")])
def test_a_file_of_another_width_is_noticed(tmp_path, vocab, dtype, meta, said):
    write(tmp_path, vocab=vocab, dtype=dtype, train=90_000, meta=False)
    if meta:
        (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert said in refusal(tmp_path, vocab_size=0 if meta else vocab)


def test_a_file_that_is_too_short_or_cut_within_a_number_is_refused(tmp_path):
    write(tmp_path, train=8)
    assert "has 16 bytes" in refusal(tmp_path)
    write(tmp_path, train=9)
    assert len(load(tmp_path).train) == 1
    with open(tmp_path / "train.bin", "ab") as file:
        file.write(b"x")
    assert "no whole number of uint16" in refusal(tmp_path)
    (tmp_path / "val.bin").unlink()
    assert "val.bin" in refusal(write(tmp_path / "b", val=8))


def test_changed_tokens_change_the_fingerprint_and_a_moved_folder_does_not(tmp_path):
    write(tmp_path / "a", train=90_000)
    marks = {load(tmp_path / "a").fingerprint, load(tmp_path / "a", length=9).fingerprint}
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    assert load(tmp_path / "b").fingerprint in marks
    tokens = np.memmap(tmp_path / "a/train.bin", "<u2", "r+")
    tokens[44_444] ^= 1
    tokens.flush()
    marks.add(load(tmp_path / "a").fingerprint)
    assert len(marks) == 3


def test_a_missing_file_is_said_before_torch_is_imported(tmp_path):
    code = ("import sys; from common.options import parse_options\n"
            "try: parse_options('', sys.argv[1:])\n"
            "finally: print('torch' in sys.modules)")
    command = [sys.executable, "-c", code, "--dataset=tokens:8", f"--data-dir={tmp_path}"]
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "False\n"
    assert f"{tmp_path}/train.bin does not exist" in done.stderr
