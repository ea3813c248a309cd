"""Damage of any kind to a checkpoint is noticed before a value is used, and the one before is loaded."""

import contextlib
import copy
import json
import os
import pickle
import random
import resource
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from stores import (
    SAMPLED,
    Adapted,
    a_life,
    damaged,
    flips,
    images_for,
    load,
    load_into,
    options,
    two_checkpoints,
)

from common.checkpoint import disk
from common.checkpoint.folder import committed
from common.checkpoint.reader import FACTS, digest_of, read_manifest
from common.errors import UserError
from common.extras.chosen import describe
from common.sealed import sealed, sha, to_json
from common.story import complete

CANARY = "canary"


def two_of(tmp_path):
    """(root, images, [(file, its bytes)] of the newer one of two checkpoints, its tables)

    The two have one file of frozen weights: here each gets one of its own, as a copy of the folder has.
    """
    opts, root = two_checkpoints(tmp_path, net=Adapted())
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root)
    shutil.move(tmp_path / "copy", root)
    files = [(path, path.read_bytes()) for path in sorted((root / "step-00000002").iterdir())]
    return root, images_for(opts, Adapted()), files, read_manifest(root / "step-00000002")["files"]


def restore(path, data):
    if os.path.lexists(path):
        os.unlink(path)
    path.write_bytes(data)


@SAMPLED
def test_every_length_of_every_file_but_the_right_one_falls_back(tmp_path, every):
    root, images, files, tables = two_of(tmp_path)
    assert len(files) == 5 and load(root, images) == (2, True)
    for path, data in files:
        edges = (0, len(data) - 1, len(data) + 1, len(data) + 4096)
        for length in [*edges, *range(1 + random.Random(len(data)).randrange(every), len(data) - 1, every)]:
            os.truncate(path, length)
            assert damaged(path, tables.get(path.name)), (path.name, length)
            if length in edges or length % 7 == 0:  # a whole start; see flips
                assert load(root, images) == (1, True), (path.name, length)
            restore(path, data)
    assert load(root, images) == (2, True)


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


def test_a_missing_file_and_a_file_of_the_other_checkpoint_fall_back(tmp_path):
    root, images, files, _ = two_of(tmp_path)
    for path, data in files:
        path.unlink()
        assert load(root, images) == (1, True)
        shutil.copy(root / "step-00000001" / path.name, path)
        assert load(root, images) == (2 if path.name == "frozen.safetensors" else 1, True)
        restore(path, data)


# ---- files made to harm ---------------------------------------------------------------------------
class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {CANARY}",)


def zip_bomb(data):
    with zipfile.ZipFile("x.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.pkl", bytes(50_000_000))
    return Path("x.zip").read_bytes()


def header(**news):
    """Our file with changed entries in its header, of the same length where that is possible."""

    def make(data):
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        entries["0.weight"].update(news)
        text = json.dumps(entries, separators=(",", ":")).encode().ljust(length)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return make


HARMFUL_TENSORS = {
    "a pickle of the right length": lambda data: pickle.dumps(Bomb()).ljust(len(data), b"\0")[: len(data)],
    "a zip bomb": zip_bomb,
    "a header of 2**63 bytes": lambda data: (2**63 - 1).to_bytes(8, "little") + data[8:],
    "overlapping offsets": header(data_offsets=[4, 28]),
    "more elements than bytes": header(shape=[3, 2]),
    "another type": header(dtype="I32"),
}


def falls_back(tmp_path, harm):
    """Whether a start goes past a checkpoint that `harm` has changed, cheaply, and runs nothing of it."""
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)
    harm(root / "step-00000002")
    return cheaply(lambda: load(root, images)) == (1, True) and not os.path.exists(CANARY)


@pytest.mark.parametrize("kind", HARMFUL_TENSORS)
def test_tensors_whose_header_is_not_ours_are_refused_unparsed(tmp_path, kind):
    def harm(folder):
        path = folder / "model.safetensors"
        restore(path, HARMFUL_TENSORS[kind](path.read_bytes()))

    assert falls_back(tmp_path, harm)


def change(act):
    """The manifest after `act` on a copy of it, with a right seal."""

    def make(old):
        value = copy.deepcopy(old)
        act(value)
        return sealed(value)

    return make


def row(at, value):
    """Another type (0), shape (1), first row (2) or hash (3) of a tensor."""
    return change(lambda manifest: manifest["files"]["model.safetensors"]["0.weight"].__setitem__(at, value))


HARMFUL_MANIFESTS = {
    "a pickle": lambda old: pickle.dumps(Bomb()),
    "a huge number": lambda old: sealed(old).replace(b'"step": 2', b'"step": ' + b"9" * 50_000),
    "deep nesting": lambda old: b'{"a":' * 10_000,
    "a name twice": lambda old: sealed(old).replace(b'"step": 2', b'"step": 2,\n "step": 2'),
    "nested too deep to be sealed again": lambda old: (
        to_json(old)[:-3] + b',"z":' + b"[" * 2000 + b"]" * 2000 + b"}"
    ),
    "no hash of the facts": change(lambda value: value.pop("state")),
    "no run": change(lambda value: value.pop("run")),
    "no files": change(lambda value: value.update(files={})),
    "a path out of the folder": change(lambda value: value["files"].update({"../../options.json": {}})),
    "without a tensor": change(lambda value: value["files"]["model.safetensors"].popitem()),
    "an unknown type": row(0, "OBJ"),
    "another type": row(0, "I32"),
    "10**18 elements": row(1, [10**9, 10**9]),
    "negative sizes": row(1, [-2, -3]),
    "sizes that are no numbers": row(1, ["7"]),
    "a hash that is a number": row(2, 1),
    "a hash that is none": row(2, "../../etc/passwd"),
}


def manifest_of(folder):
    value = json.loads((folder / "manifest.json").read_text())
    value.pop("seal")
    return value


@pytest.mark.parametrize("kind", HARMFUL_MANIFESTS)
def test_harmful_manifests_are_refused_even_under_a_right_seal(tmp_path, kind):
    def harm(folder):
        restore(folder / "manifest.json", HARMFUL_MANIFESTS[kind](manifest_of(folder)))

    assert falls_back(tmp_path, harm)


def test_the_digest_that_is_shown_is_that_of_the_tables_whatever_the_manifest_says(tmp_path):
    _, root = two_checkpoints(tmp_path)
    folder = root / "step-00000002"
    _, line = describe(2, folder)
    restore(folder / "manifest.json", sealed(manifest_of(folder) | {"digest": "0" * 64}))
    assert describe(2, folder) == (True, line) and "0" * 64 not in line


def test_types_and_shapes_make_another_digest_of_the_same_bytes():
    kinds = ("F32", [2, 8]), ("F32", [16]), ("I64", [8])
    tables = [{"model.safetensors": {"w": [*kind, "0" * 64]}} for kind in kinds]
    assert len({*map(digest_of, tables)}) == 3


def lacking(name):
    return lambda old: to_json({key: value for key, value in old.items() if key != name})


def worded(name):
    return lambda old: to_json(old | {name: "x"})


HARMFUL_FACTS = {
    "a pickle": lambda old: pickle.dumps(Bomb()),
    "nothing in it": lambda old: to_json({}),
    "another step": lambda old: to_json(old | {"step": 3}),
    "deep nesting": lambda old: b'{"a":' * 10_000,
    "larger than any of ours": lambda old: b" " * (1 << 22),
    "a best evaluation of no step": lambda old: to_json(old | {"best": {}}),
    "counters that are none": lambda old: to_json(old | {"best": 7}),
}
HARMFUL_FACTS |= {f"without {name}": lacking(name) for name in FACTS}
HARMFUL_FACTS |= {f"a {name} that is a word": worded(name) for name in FACTS}


@pytest.mark.parametrize("kind", HARMFUL_FACTS)
def test_harmful_facts_are_refused_whatever_the_manifest_says(tmp_path, monkeypatch, kind):
    def harm(folder):
        facts = HARMFUL_FACTS[kind](json.loads((folder / "state.json").read_bytes()))
        restore(folder / "state.json", facts)
        restore(folder / "manifest.json", sealed(manifest_of(folder) | {"state": sha(facts)}))

    monkeypatch.setattr(disk, "MOST_BYTES", 1 << 16)
    assert falls_back(tmp_path, harm)


def cheaply(function):
    """What function returns, if it took no more than a few megabytes, and 64 MB of address space."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), before[1]))
    tracemalloc.start()
    try:
        result = function()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        return result
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, before)


def odd_entries(path, tmp_path):
    """Things under a checkpoint's names that are no regular files of ours."""
    same = tmp_path / "same"
    same.write_bytes(path.read_bytes())
    yield lambda: path.symlink_to(same)  # even if it led to the right bytes
    yield lambda: os.mkfifo(path)
    yield lambda: path.mkdir()
    yield lambda: path.symlink_to(path)
    yield lambda: path.symlink_to("/dev/zero")


def test_links_pipes_and_folders_in_place_of_files_are_not_followed_nor_waited_for(tmp_path):
    root, images, files, _ = two_of(tmp_path)
    opts = options(tmp_path, max_steps=2)
    for path, data in files:
        for plant_it in [*odd_entries(path, tmp_path)]:
            path.unlink()
            plant_it()
            assert load(root, images) == (1, True) and not complete(opts)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            restore(path, data)


def test_a_pipe_in_place_of_a_checkpoint_is_deleted_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "step-00000002")
    disk.delete(tmp_path / "step-00000002")
    assert not [*tmp_path.iterdir()]


def test_links_in_place_of_checkpoints_are_not_followed(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    shutil.move(root / "step-00000002", tmp_path / "elsewhere")
    (root / "step-00000002").symlink_to(tmp_path / "elsewhere")
    (root / "step-00000009").write_text("a file")
    (root / "step-00000003.tmp").mkdir()
    assert load(root, images_for(opts)) == (1, True) and [step for step, _ in committed(root)] == [9, 2, 1]
    with a_life(opts) as life:
        assert life.state.progress.step == 1 and (tmp_path / "elsewhere" / "manifest.json").exists()


def test_planted_links_are_never_written_through(tmp_path, run):
    opts = options(tmp_path)
    victim = tmp_path / "victim"
    (run).mkdir(mode=0o700)
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
    said = []
    assert not load_into(images_for(opts, net), root, said).facts
    assert "0.bias is ['F32', [2]], this run has ['F32', [20]]" in said[0]
