"""Files in blocks: threads hash and read side by side; no block is skipped, swapped or taken for another."""
import copy
import errno
import hashlib
import json
import os
from functools import partial

import pytest
from stores import a_life, damaged, flips, images_for, is_at, load, options, save, two_checkpoints

from common.checkpoint import blocks
from common.checkpoint.files import Damaged, sealed
from common.checkpoint.manifest import TENSORS, describe, digest_of, read_manifest

BLOCK = 64
THOROUGH = 1                                     # every n-th bit; the test of the tests takes fewer


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)


def make_small(monkeypatch):
    """Blocks of a few bytes and four threads: a tiny state has several."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(blocks, "SYNC_BYTES", 3 * BLOCK)
    monkeypatch.setattr(blocks, "threads", lambda *_: 4)
    monkeypatch.setattr("common.checkpoint.manifest.threads", blocks.threads)
    monkeypatch.setattr("common.checkpoint.load.threads", blocks.threads)


def model_of(root):
    return root / "step-00000002" / "model.safetensors"


def replant(folder, change, format=2):
    """Changes the manifest and makes its digest and its seal right again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("seal")
    change(manifest["files"])
    roots = {part: manifest["files"][name]["sha256"] for part, name in TENSORS.items()}
    path.write_bytes(sealed(manifest | {"format": format, "digest": digest_of(roots)}))


def test_every_bit_of_every_block_falls_back_when_it_flips(tmp_path, small):
    opts, root = two_checkpoints(tmp_path)
    images, path = images_for(opts), model_of(root)
    entry = read_manifest(2, path.parent)["files"][path.name]
    assert len(entry["blocks"]) > 4 and load(root, images) == (2, True)
    for bit, a_start in flips(path, THOROUGH):
        assert damaged(path, entry, count=4), bit
        assert not a_start or load(root, images) == (1, True), bit
    assert load(root, images) == (2, True)


def swapped(pairs):
    pairs[1][1], pairs[2][1] = pairs[2][1], pairs[1][1]


def true_for_an_end(pairs):
    pairs[0][0] = True


WRONG_BLOCKS = {
    "swapped": swapped, "true for an end": true_for_an_end,
    "without the last": lambda pairs: pairs.pop(),
    "without one": lambda pairs: pairs.pop(1),
    "not rising": lambda pairs: pairs.__setitem__(1, [pairs[0][0], pairs[1][1]]),
    "an empty one more": lambda pairs: pairs.insert(1, [pairs[0][0], hashlib.sha256().hexdigest()]),
    "shifted": lambda pairs: pairs.__setitem__(1, [pairs[1][0] + 1, pairs[1][1]]),
    "no pairs": lambda pairs: pairs.__setitem__(0, pairs[0] * 2),
    "no hash": lambda pairs: pairs.__setitem__(0, [pairs[0][0], "x" * 64]),
    "none": lambda pairs: pairs.clear()}


@pytest.mark.parametrize("rooted", [False, True], ids=["", "its one hash made right"])
@pytest.mark.parametrize("kind", WRONG_BLOCKS)
def test_a_manifest_that_tells_of_other_blocks_is_refused_even_under_a_right_seal(
        tmp_path, small, kind, rooted):
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)

    def change(files):
        entry = files["model.safetensors"]
        WRONG_BLOCKS[kind](entry["blocks"])
        if rooted:
            entry["sha256"] = blocks.root([pair[1] for pair in entry["blocks"]])
    replant(root / "step-00000002", change)
    assert load(root, images) == (1, True)


def test_the_one_hash_of_a_file_is_that_of_its_blocks(tmp_path, small):
    """The digest of a checkpoint is made of it."""
    opts, root = two_checkpoints(tmp_path)
    replant(root / "step-00000002", lambda files: files["model.safetensors"].update(sha256="0" * 64))
    assert load(root, images_for(opts)) == (1, True)


def test_two_blocks_that_changed_places_in_a_file_are_damage(tmp_path, small):
    opts, root = two_checkpoints(tmp_path)
    images, path = images_for(opts), model_of(root)
    data = path.read_bytes()
    assert data[BLOCK:2 * BLOCK] != data[2 * BLOCK:3 * BLOCK]
    path.write_bytes(data[:BLOCK] + data[2 * BLOCK:3 * BLOCK] + data[BLOCK:2 * BLOCK] + data[3 * BLOCK:])
    assert load(root, images) == (1, True)


def test_the_hashes_in_a_manifest_are_those_of_the_bytes(tmp_path, small):
    _, root = two_checkpoints(tmp_path)
    manifest = json.loads((root / "step-00000002" / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data, hashes = (root / "step-00000002" / name).read_bytes(), []
        for start in range(0, len(data), BLOCK):
            hashes.append(hashlib.sha256(data[start:start + BLOCK]).hexdigest())
        assert [found for _, found in entry["blocks"]] == hashes
        assert entry["sha256"] == hashlib.sha256("".join(hashes).encode()).hexdigest()


@pytest.mark.parametrize("name", ["fdatasync", "pwrite"])
def test_a_long_file_whose_disk_fails_in_the_middle_is_no_checkpoint(tmp_path, small, monkeypatch, name):
    opts, real, count = options(tmp_path), getattr(os, name), []

    def fails(fd, *args):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            count.append(fd)
            if len(count) % 2 == 0:
                raise OSError(errno.EIO, "Input/output error")
        return real(fd, *args)

    with a_life(opts) as life:
        save(life, 1)
        monkeypatch.setattr(os, name, fails)
        with pytest.raises(OSError, match="EIO"):
            save(life, 2)
        monkeypatch.undo()
        assert len(count) >= 4  # it was tried again, once, with other files
    with a_life(opts) as life:
        assert is_at(life.state, 1)


def test_a_reader_of_some_blocks_reads_and_compares_those_alone(tmp_path, small):
    data = bytes(range(256)) * 3
    path = tmp_path / "file"
    entry = blocks.write_file(path, data)
    with open(path, "r+b") as file:
        file.write(b"x")  # the first block is damaged

    def put(found, start, data):
        found[start:start + len(data)] = data

    for count in (1, 3):
        found = bytearray(len(data))
        blocks.read_file(path, entry, partial(put, found),
                         lambda start, end: BLOCK <= start and end <= 4 * BLOCK, count=count)
        assert found == bytes(BLOCK) + data[BLOCK:4 * BLOCK] + bytes(len(data) - 4 * BLOCK)
        with pytest.raises(Damaged, match=f"file has sha256 .* in bytes 0 to {BLOCK}"):
            blocks.read_file(path, entry, count=count)


def test_a_long_file_of_an_old_checkpoint_is_verified_as_one(tmp_path, small):
    opts, root = two_checkpoints(tmp_path)
    images, folder = images_for(opts), root / "step-00000002"

    def old(files):
        for name, entry in copy.deepcopy(files).items():
            data = (folder / name).read_bytes()
            files[name] = {"bytes": entry["bytes"], "sha256": hashlib.sha256(data).hexdigest()}
    replant(folder, old, format=1)
    assert load(root, images) == (2, True) and describe(2, folder)[0]
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert load(root, images) == (1, True)
