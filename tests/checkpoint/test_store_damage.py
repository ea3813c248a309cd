"""Damage of any kind to a checkpoint is noticed before a value is used, and the one before is loaded."""
import contextlib
import copy
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import tracemalloc
import zipfile

import pytest
import torch
from stores import (
    damaged,
    end,
    flips,
    images_for,
    load,
    load_into,
    new_store,
    options,
    tiny_state,
    two_checkpoints,
)

from common.checkpoint.disk import sealed, to_json
from common.checkpoint.folder import checkpoints, digest_of, read_manifest
from common.checkpoint.tensors import spans
from common.errors import UserError

THOROUGH = 0  # every n-th bit and length; set by the test of the tests
SAMPLED = [pytest.param(7, id="every 7th"), pytest.param(1, id="all", marks=pytest.mark.long)]


def files_of(root):
    return [(path, path.read_bytes()) for path in sorted((root / "step-00000002").iterdir())]


def restore(path, data):
    if os.path.lexists(path):
        os.unlink(path)
    path.write_bytes(data)


@pytest.mark.parametrize("every", SAMPLED)
def test_every_length_of_every_file_but_the_right_one_falls_back(tmp_path, every):
    every = THOROUGH or every
    opts, root = two_checkpoints(tmp_path)
    images, files = images_for(opts), files_of(root)
    entries = read_manifest(2, root / "step-00000002")["files"]
    assert len(files) == 4 and load(root, images) == (2, True)
    for path, data in files:
        edges = (0, len(data) - 1, len(data) + 1, len(data) + 4096)
        for length in [*edges, *range(1 + random.Random(len(data)).randrange(every), len(data) - 1, every)]:
            os.truncate(path, length)
            assert damaged(path, entries.get(path.name)), (path.name, length)
            if length in edges or length % 7 == 0:  # a whole start; see flips
                assert load(root, images) == (1, True), (path.name, length)
            restore(path, data)
    assert load(root, images) == (2, True)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("every", SAMPLED)
def test_every_single_bit_of_every_file_falls_back_when_it_flips(tmp_path, every, threads):
    """All of them with -m long, each 7th bit without: other bits of each byte, one by one."""
    every = THOROUGH or every
    opts, root = two_checkpoints(tmp_path)
    images, files, count = images_for(opts), files_of(root), 0
    entries = read_manifest(2, root / "step-00000002")["files"]
    assert sum(len(data) for _, data in files) <= 16 * 1024
    for path, _ in files:
        for bit, a_start in flips(path, every):
            assert damaged(path, entries.get(path.name), threads), (path.name, bit)
            assert not a_start or load(root, images) == (1, True), (path.name, bit)
            count += 1
    assert count >= sum(len(data) for _, data in files) * 8 // every and load(root, images) == (2, True)


def test_a_missing_file_and_a_file_of_the_other_checkpoint_fall_back(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)
    for path, data in files_of(root):
        path.unlink()
        assert load(root, images) == (1, True)
        shutil.copy(root / "step-00000001" / path.name, path)
        assert load(root, images) == (1, True)
        restore(path, data)


# ---- files made to harm ---------------------------------------------------------------------------
class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {CANARY}",)


CANARY = "canary"


def pickled(folder):
    return pickle.dumps(Bomb())


def torch_saved(folder):
    torch.save(Bomb(), folder / "x.pt")
    return (folder / "x.pt").read_bytes()


def zip_bomb(folder):
    with zipfile.ZipFile(folder / "x.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.pkl", bytes(50_000_000))
    return (folder / "x.zip").read_bytes()


def tensors(change=None, **header):
    """A safetensors file: ours with changed header entries, of the same length where that is possible."""
    def make(folder, data):
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:8 + length])
        for name, entry in header.items():
            entries["0.weight"][name] = entry
        text = json.dumps(entries, separators=(",", ":")).encode()
        text = (change(text) if change else text).ljust(length)
        return len(text).to_bytes(8, "little") + text + data[8 + length:]
    return make


def raw(prefix):
    return lambda folder, data: prefix + data[len(prefix):]


HARMFUL_TENSORS = {
    "a pickle": lambda folder, data: pickled(folder),
    "a pickle of the right length": lambda folder, data: pickled(folder).ljust(len(data), b"\0")[:len(data)],
    "a torch.save archive": lambda folder, data: torch_saved(folder),
    "a zip bomb": lambda folder, data: zip_bomb(folder),
    "a header of 2**63 bytes": raw((2**63 - 1).to_bytes(8, "little")),
    "a header longer than the file": raw((10**6).to_bytes(8, "little")),
    "an empty header": raw(bytes(8)),
    "negative offsets": tensors(data_offsets=[-8, 16]),
    "offsets behind the end": tensors(data_offsets=[0, 10**9]),
    "overlapping offsets": tensors(data_offsets=[4, 28]),
    "offsets backwards": tensors(data_offsets=[32, 8]),
    "more elements than bytes": tensors(shape=[3, 2]),
    "10**18 elements": tensors(shape=[10**9, 10**9]),
    "negative sizes": tensors(shape=[-2, -3]),
    "another type": tensors(dtype="I32"),
    "an unknown type": tensors(dtype="OBJ"),
    "NaN in the header": tensors(shape=[float("nan")]),
    "a name twice": tensors(lambda text: text[:-1] + b"," + text[1:text.index(b"}") + 1] + b"}"),
    "a name of its own": tensors(lambda text: text.replace(b"0.weight", b"0.wicked")),
    "deep nesting in the header": tensors(lambda text: b"[" * len(text)),
    "metadata": tensors(lambda text: b'{"__metadata__":{"a":"b"},' + text[1:]),
    "not utf-8": raw(b"\x10\0\0\0\0\0\0\0\xff\xfe\xfd\xfc"),
}


def plant(root, name, data):
    """Put `data` under the name, with a manifest whose seal, sizes and hashes are all right."""
    folder = root / "step-00000002"
    restore(folder / name, data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("seal")
    entry = manifest["files"][name]
    pieces = [span[:3] for span in spans(entry)] if entry["bytes"] == len(data) else [("", 0, len(data))]
    hashes = [[piece, end, hashlib.sha256(data[start:end]).hexdigest()] for piece, start, end in pieces]
    manifest["files"][name] = {"bytes": len(data), "sha256": hashes}
    restore(folder / "manifest.json", sealed(manifest | {"digest": digest_of(manifest["files"])}))


@pytest.mark.parametrize("kind", HARMFUL_TENSORS)
def test_harmful_tensors_are_refused_whatever_the_manifest_says(tmp_path, monkeypatch, kind):
    opts, root = two_checkpoints(tmp_path)
    images, path = images_for(opts), root / "step-00000002" / "model.safetensors"
    monkeypatch.chdir(tmp_path)
    plant(root, "model.safetensors", HARMFUL_TENSORS[kind](tmp_path, path.read_bytes()))
    assert cheaply(lambda: load(root, images)) == (1, True)
    assert not os.path.exists(CANARY)


ONE = [["", 1, "0" * 64]]


def change(act):
    """The manifest after `act` on a copy of it, with a right seal and a right digest."""
    def make(old):
        value = copy.deepcopy(old)
        digest = value["digest"]
        act(value)
        with contextlib.suppress(Exception):
            value["digest"] = digest_of(value["files"]) if value["digest"] == digest else value["digest"]
        return sealed(value)
    return make


def pieces(act):
    return change(lambda value: act(value["files"]["model.safetensors"]["sha256"]))


HARMFUL_MANIFESTS = {
    "a pickle": lambda old: pickle.dumps(Bomb()),
    "a huge number": lambda old: sealed(old).replace(b'"step": 2', b'"step": ' + b"9" * 50_000),
    "deep nesting": lambda old: b'{"a":' * 10_000,
    "a list": lambda old: b"[1, 2]\n",
    "a name twice": lambda old: sealed(old).replace(b'"step": 2', b'"step": 2,\n "step": 2'),
    "gigabytes of JSON": lambda old: b" " * (1 << 22) + sealed(old),
    "not utf-8": lambda old: sealed(old).replace(b'"run"', b'"\xff\xfe"'),
    "another step": change(lambda value: value.update(step=3)),
    "another digest": change(lambda value: value.update(digest="0" * 64)),
    "no files": change(lambda value: value.update(files={})),
    "files as a list": change(lambda value: value.update(files=[1])),
    "a path out of the folder": change(lambda value: value["files"].update(
        {"../../options.json": {"bytes": 1, "sha256": ONE}})),
    "a size of 10**18": change(lambda value: value["files"]["model.safetensors"].update(bytes=10**18)),
    "a hash that is none": pieces(lambda rows: rows[0].__setitem__(2, "../../etc/passwd")),
    "pieces swapped": pieces(lambda rows: rows.__setitem__(slice(1, 3), rows[2:0:-1])),
    "without the last piece": pieces(lambda rows: rows.pop()),
    "without a header": pieces(lambda rows: rows.pop(0)),
    "pieces that do not rise": pieces(lambda rows: rows[2].__setitem__(1, rows[0][1] - 1)),
    "a piece's name twice": pieces(lambda rows: rows[1].__setitem__(0, rows[2][0])),
    "pieces without end": pieces(lambda rows: rows[1].__setitem__(1, "7")),
    "no pieces": pieces(lambda rows: rows.clear()),
}


@pytest.mark.parametrize("kind", HARMFUL_MANIFESTS)
def test_harmful_manifests_are_refused_even_under_a_right_seal(tmp_path, monkeypatch, kind):
    opts, root = two_checkpoints(tmp_path)
    images, path = images_for(opts), root / "step-00000002" / "manifest.json"
    monkeypatch.chdir(tmp_path)
    old = json.loads(path.read_text())
    old.pop("seal")
    restore(path, HARMFUL_MANIFESTS[kind](old))
    assert cheaply(lambda: load(root, images)) == (1, True)
    assert not os.path.exists(CANARY)


@pytest.mark.parametrize("facts", [pickle.dumps(Bomb()), to_json({}), to_json({"step": 3}), b" " * (1 << 22)],
                         ids=["a pickle", "nothing in it", "another step", "larger than any of ours"])
def test_harmful_facts_are_refused_whatever_the_manifest_says(tmp_path, monkeypatch, facts):
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)
    monkeypatch.chdir(tmp_path)
    plant(root, "state.json", facts)
    assert cheaply(lambda: load(root, images)) == (1, True)
    assert not os.path.exists(CANARY)


def cheaply(function):
    """What function returns, if it took no more than a few megabytes and 64 MB of address space beyond
    today's.
    """
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
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
    victim, same = tmp_path / "victim", tmp_path / "same"
    victim.write_text("mine")
    same.write_bytes(path.read_bytes())
    yield lambda: path.symlink_to(same)  # even if it led to the right bytes
    yield lambda: path.symlink_to(victim)
    yield lambda: path.symlink_to(path.parent.parent / "step-00000001" / path.name)
    yield lambda: os.mkfifo(path)
    yield lambda: path.mkdir()
    yield lambda: path.symlink_to(path)
    yield lambda: path.symlink_to("/dev/zero")


def test_links_pipes_and_folders_in_place_of_files_are_not_followed_nor_waited_for(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)
    for path, data in files_of(root):
        for plant_it in [*odd_entries(path, tmp_path)]:
            path.unlink()
            plant_it()
            assert load(root, images) == (1, True)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            restore(path, data)
    assert (tmp_path / "victim").read_text() == "mine"


def test_links_in_place_of_checkpoints_are_not_followed(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    images = images_for(opts)
    shutil.move(root / "step-00000002", tmp_path / "elsewhere")
    (root / "step-00000002").symlink_to(tmp_path / "elsewhere")
    (root / "step-00000009").write_text("a file")
    for name in ("step-1", "step-0000000x", "step-00000003.tmp", "step-٠٠٠٠٠٠٠٤", f"step-{'9' * 400}"):
        try:
            (root / name).mkdir()
        except OSError:
            assert len(name) > 255
    assert load(root, images) == (1, True) and [step for step, _ in checkpoints(root)] == [9, 2, 1]
    said = []
    store, state = new_store(opts, said=said), tiny_state(opts)
    store.restore(state)
    assert state.step == 1 and (tmp_path / "elsewhere" / "manifest.json").exists()
    end(store)


def test_planted_links_are_never_written_through(tmp_path):
    opts, victim = options(tmp_path), tmp_path / "victim"
    (tmp_path / "run").mkdir(mode=0o700)
    victim.write_text("mine")
    for name in ("lock", "options.json"):
        (tmp_path / "run" / name).symlink_to(victim)
        with pytest.raises(UserError):
            new_store(opts).restore(tiny_state(opts))
        (tmp_path / "run" / name).unlink()
    assert victim.read_text() == "mine"


def test_the_wrong_net_is_named_with_both_shapes(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    net, said = torch.nn.Sequential(torch.nn.Linear(30, 20)), []
    assert load_into(images_for(opts, net), root, said.append).step == -1
    assert "this model and optimizer need" in said[0]
    plant(root, "model.safetensors",
          tensors(shape=[3, 2])(tmp_path, (root / "step-00000002" / "model.safetensors").read_bytes()))
    load_into(images_for(opts), root, said.append)
    assert "0.weight is F32[3, 2]" in said[-1] and "this run has F32[2, 3]" in said[-1]
