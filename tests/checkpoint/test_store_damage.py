"""Damage of any kind to a checkpoint is noticed before a value is used, and the one before is loaded."""

import contextlib
import json
import os
import pickle
import shutil
import tracemalloc
from functools import partial

import pytest
import torch
from poisoned import Bomb
from stores import (
    SAMPLED,
    Adapted,
    a_life,
    damaged,
    flips,
    heard,
    images_for,
    load,
    load_into,
    resumes_at,
    two_checkpoints,
)

from common.checkpoint import disk
from common.checkpoint.reader import FACTS, digest_of, read_manifest
from common.errors import UserError
from common.extras.chosen import describe
from common.sealed import sealed, sha, to_json


def two_of(tmp_path):
    """(root, images, [(file, its bytes)] of the newer one of two checkpoints, its tables)

    The two have one file of frozen weights: here each gets one of its own, as a copy of the folder has.
    """
    opts, root = two_checkpoints(tmp_path, net=Adapted())
    older = root / "step-00000001/frozen.safetensors"
    frozen = older.read_bytes()
    older.unlink()
    older.write_bytes(frozen)
    files = [(path, path.read_bytes()) for path in sorted((root / "step-00000002").iterdir())]
    assert len(files) == 5
    return root, images_for(opts, Adapted()), files, read_manifest(root / "step-00000002")["files"]


@pytest.mark.parametrize("threads", [1, 4])
@SAMPLED
def test_every_single_bit_of_every_file_falls_back_when_it_flips(tmp_path, every, threads):
    """All of them with -m long, each 29th bit without: other bits of each fourth byte, one by one."""
    root, images, files, tables = two_of(tmp_path)
    count = 0
    assert sum(len(data) for _, data in files) <= 16 * 1024
    for path, _ in files:
        for bit, a_start in flips(path, every):
            assert damaged(path, tables.get(path.name), threads), (path.name, bit)
            assert not a_start or load(root, images) == (1, True), (path.name, bit)
            count += 1
    assert count >= sum(len(data) for _, data in files) * 8 // every and load(root, images) == (2, True)


def not_the_file(path, data):
    """What puts something else under its name, after the file was deleted."""
    same = path.parents[1] / "same"
    same.write_bytes(data)
    lengths = (0, len(data) // 2, len(data) - 1, len(data) + 1, len(data) + 4096)
    return [
        *(partial(path.write_bytes, (data + bytes(4096))[:length]) for length in lengths),
        lambda: None,
        partial(path.symlink_to, same),  # even if it leads to the right bytes
        partial(path.symlink_to, path),
        partial(path.symlink_to, "/dev/zero"),
        partial(os.mkfifo, path),
        path.mkdir,
    ]


def test_a_file_of_another_length_and_what_is_no_file_of_ours_fall_back_and_nobody_waits(tmp_path):
    root, images, files, _ = two_of(tmp_path)
    for path, data in files:
        for number, plant in enumerate(not_the_file(path, data)):
            disk.delete(path)
            plant()
            assert load(root, images) == (1, True), (path.name, number)
        disk.delete(path)
        shutil.copy(root / "step-00000001" / path.name, path)
        assert load(root, images) == (2 if path.name == "frozen.safetensors" else 1, True)
        path.write_bytes(data)
        assert load(root, images) == (2, True)


# ---- files made to harm ---------------------------------------------------------------------------
def row(at, value):
    """Another type (0), shape (1) or hash (2) of a tensor."""

    def make(manifest):
        manifest["files"]["model.safetensors"]["0.weight"][at] = value
        return manifest

    return make


def without_a_tensor(manifest):
    manifest["files"]["model.safetensors"].popitem()
    return manifest


def without(name):
    return lambda old: {key: value for key, value in old.items() if key != name}


def worded(name):
    return lambda old: old | {name: "x"}


# {kind: what it makes of the right content}; under the right hashes and seal, unless it makes bytes
TENSORS = {
    "a pickle of the right length": lambda data: pickle.dumps(Bomb()).ljust(len(data), b"\0")[: len(data)],
    "a header of 2**63 bytes": lambda data: (2**63 - 1).to_bytes(8, "little") + data[8:],
    "a header without tensors": lambda data: (2).to_bytes(8, "little") + b"{}" + data[10:],
}
MANIFESTS = {
    "a pickle": lambda old: pickle.dumps(Bomb()),
    "a huge number, without a seal, as of an old format": lambda old: b'{\n"a":' + b"9" * 50_000 + b"}",
    "deep nesting, as of an old format": lambda old: b'{\n"a":' * 10_000,
    "no hash of the facts": without("state"),
    "no files": lambda old: old | {"files": {}},
    "a path out of the folder": lambda old: old | {"files": old["files"] | {"../../options.json": {}}},
    "without a tensor": without_a_tensor,
    "an unknown type": row(0, "OBJ"),
    "10**18 elements": row(1, [10**9, 10**9]),
    "negative sizes": row(1, [-2, -3]),
    "sizes that are no numbers": row(1, ["7"]),
    "a hash that is a number": row(2, 1),
}
FACTS_OF_A_STATE = {
    "a pickle": lambda old: pickle.dumps(Bomb()),
    "another step": lambda old: old | {"step": 3},
    "deep nesting": lambda old: b'{"a":' * 10_000,
    "larger than any of ours": lambda old: b" " * (1 << 22),
    "a best evaluation of no step": lambda old: old | {"best": {}},
}
FACTS_OF_A_STATE |= {f"without {name}": without(name) for name in FACTS}
FACTS_OF_A_STATE |= {f"a {name} that is a word": worded(name) for name in FACTS}


def manifest_of(folder):
    value = json.loads((folder / "manifest.json").read_text())
    value.pop("seal")
    return value


def write_manifest(folder, value):
    data = value if isinstance(value, bytes) else sealed(value)
    (folder / "manifest.json").write_bytes(data)


def falls_back(tmp_path, harm):
    """Whether a start goes past a checkpoint that `harm` has changed, cheaply, and runs nothing of it."""
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)
    harm(root / "step-00000002")
    tracemalloc.start()
    found = load(root, images)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return found == (1, True) and most < 8 << 20 and not os.path.exists("canary")


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_whose_header_is_not_ours_are_refused_unparsed(tmp_path, kind):
    def harm(folder):
        path = folder / "model.safetensors"
        path.write_bytes(TENSORS[kind](path.read_bytes()))

    assert falls_back(tmp_path, harm)


@pytest.mark.parametrize("kind", MANIFESTS)
def test_harmful_manifests_are_refused_even_under_a_right_seal(tmp_path, kind):
    assert falls_back(tmp_path, lambda folder: write_manifest(folder, MANIFESTS[kind](manifest_of(folder))))


@pytest.mark.parametrize("kind", FACTS_OF_A_STATE)
def test_harmful_facts_are_refused_whatever_the_manifest_says(tmp_path, monkeypatch, kind):
    def harm(folder):
        path = folder / "state.json"
        facts = FACTS_OF_A_STATE[kind](json.loads(path.read_bytes()))
        data = facts if isinstance(facts, bytes) else to_json(facts)
        path.write_bytes(data)
        write_manifest(folder, manifest_of(folder) | {"state": sha(data)})

    monkeypatch.setattr(disk, "MOST_BYTES", 1 << 16)
    assert falls_back(tmp_path, harm)


def test_the_digest_that_is_shown_is_that_of_the_tables_whatever_the_manifest_says(tmp_path):
    _, root = two_checkpoints(tmp_path)
    folder = root / "step-00000002"
    _, line = describe(2, folder)
    write_manifest(folder, manifest_of(folder) | {"digest": "0" * 64})
    assert describe(2, folder) == (True, line) and "0" * 64 not in line


def test_types_and_shapes_make_another_digest_of_the_same_bytes():
    kinds = ("F32", [2, 8]), ("F32", [16]), ("I64", [8])
    assert len({digest_of({"model.safetensors": {"w": [*kind, "0" * 64]}}) for kind in kinds}) == 3


def test_links_in_place_of_checkpoints_are_not_followed(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    shutil.move(root / "step-00000002", tmp_path / "elsewhere")
    (root / "step-00000002").symlink_to(tmp_path / "elsewhere")
    (root / "step-00000009").write_text("a file")
    assert resumes_at(opts, 1) and (tmp_path / "elsewhere" / "manifest.json").exists()


def test_planted_links_are_never_written_through(tmp_path, opts, run):
    victim = tmp_path / "victim"
    run.mkdir(mode=0o700)
    victim.write_text("mine")
    for name in ("lock", "options.json"):
        (run / name).symlink_to(victim)
        with contextlib.suppress(UserError), a_life(opts):
            pass
        (run / name).unlink()
    assert victim.read_text() == "mine"


def test_the_wrong_net_is_named_with_both_shapes(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    net = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(2))
    with heard() as said:
        assert not load_into(images_for(opts, net), root).facts
    assert "0.bias is ['F32', [2]], this run has ['F32', [20]]" in said[0]
