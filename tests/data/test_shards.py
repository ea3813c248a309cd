"""Tar shards: an index that is made once, samples by their offsets, errors for damaged shards."""
import io
import json
import os
import shutil
import tarfile

import pytest
import torch
from ranks import fork_ranks
from test_datasets import load, options, refusal

from common.data import batches, load_data, shards
from common.errors import UserError
from common.sampler import ElasticSampler

image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")


def picture(number):
    file = io.BytesIO()
    image.new("RGB", (40 + number % 3, 36), (number * 10 % 256, 5, 200)).save(file, "png")
    return file.getvalue()


def write_tar(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))


def write_shards(folder, count=3, size=4, json_labels=False):
    for part, shards_ in (("train", count), ("val", 1)):
        for number in range(shards_):
            files = []
            for k in range(number * size, number * size + size):
                label = (".json", json.dumps({"cls": k % 2})) if json_labels else (".cls", f"{k % 2}\n")
                files += [(f"a/{k:05}{kind}", content) for kind, content in (
                    (".png", picture(k)), (label[0], label[1].encode()), (".txt", b"x"))]
            write_tar(folder / f"{part}-{number:03}.tar", files)
    return folder


def tar(folder, **more):
    return load("tar", folder, image_size=32, run_dir=folder.parent / "run", **more)


def test_samples_are_read_from_shards_in_the_order_of_names(tmp_path):
    data = tar(write_shards(tmp_path / "a"))
    assert (len(data.train), len(data.test), data.classes, data.sample_shape) == (12, 4, 2, (3, 32, 32))
    found, labels = zip(*(data.train.dataset[i] for i in range(12)), strict=True)
    assert [x.getpixel((3, 3)) for x in found] == [(k * 10, 5, 200) for k in range(12)]
    assert list(labels) == [k % 2 for k in range(12)] and data.train.groups == [4, 4, 4]


@pytest.mark.parametrize("layout", ["folders", "json", "other names"])
def test_other_layouts_hold_the_same_samples(tmp_path, layout):
    flat = tar(write_shards(tmp_path / "a")).train.fetch(list(range(12)))
    folder, flags = write_shards(tmp_path / "b", json_labels=layout == "json"), {}
    for path in list(folder.glob("*.tar")) if layout == "folders" else ():
        (folder / path.name[:-8]).mkdir(exist_ok=True)
        path.rename(folder / path.name[:-8] / path.name)
    for path in list(folder.glob("*.tar")) if layout == "other names" else ():
        path.rename(folder / path.name.replace("train", "imagenet-learn").replace("val", "exam"))
        flags = {"train_folder": "imagenet-learn", "val_folder": "exam"}
    assert all(map(torch.equal, flat, tar(folder, **flags).train.fetch(list(range(12)))))


def test_a_batch_is_the_same_with_workers_and_at_any_world(tmp_path):
    data = tar(write_shards(tmp_path / "a"))
    alone = list(batches(data.train, ElasticSampler(data.train, 5), options("tar")))
    halves = [list(batches(data.train, ElasticSampler(data.train, 5, rank, 2), options("tar", workers=2)))
              for rank in range(2)]
    for whole, left, right in zip(alone, *halves, strict=True):
        assert torch.equal(whole.x, torch.cat([left.x, right.x])) and whole.ids == left.ids + right.ids
    assert sorted(i for batch in alone for i in batch.ids) == list(range(12))


def test_the_index_is_made_once_and_again_when_a_shard_has_changed(tmp_path, monkeypatch):
    looked, look = [], shards.look_through
    monkeypatch.setattr(shards, "look_through", lambda paths: looked.append(len(paths)) or look(paths))
    folder = write_shards(tmp_path / "a")
    first = tar(folder).fingerprint
    assert tar(folder).fingerprint == first and looked == [3, 1]
    assert {path.name for path in folder.glob(".*")} == {".train.index", ".val.index"}
    (folder / ".train.index").write_bytes((folder / ".train.index").read_bytes()[:-8])  # a power cut
    assert tar(folder).fingerprint == first and looked == [3, 1, 3]
    os.utime(folder / "train-001.tar", (1, 1))
    assert tar(folder).fingerprint == first and looked == [3, 1, 3, 3]
    shutil.copytree(folder, tmp_path / "b", copy_function=shutil.copyfile)
    assert tar(tmp_path / "b").fingerprint == first
    write_tar(folder / "train-001.tar", [("7.png", picture(7)), ("7.cls", b"1")])
    data = tar(folder)
    assert data.fingerprint != first and len(data.train) == 9


def test_an_index_in_which_any_bit_has_flipped_is_made_again(tmp_path):
    """Its rows are labels and offsets: a flipped bit would train on another class without a word."""
    folder = write_shards(tmp_path / "a")
    tar(folder)
    path, stamps = folder / ".train.index", [shards.stamp(path) for path in sorted(folder.glob("train*.tar"))]
    whole = path.read_bytes()
    assert shards.read_index(path, stamps)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1:])
        assert not shards.read_index(path, stamps), at
    tar(folder)
    assert path.read_bytes() == whole


def test_labels_that_were_changed_change_the_fingerprint(tmp_path):
    folder = write_shards(tmp_path / "a")
    first = tar(folder).fingerprint
    content = (folder / "train-000.tar").read_bytes()
    (folder / "train-000.tar").write_bytes(content.replace(b"0\n" + bytes(510), b"1\n" + bytes(510), 1))
    assert tar(folder).fingerprint != first


def test_where_nobody_may_write_the_index_is_kept_in_the_run_folder(tmp_path, monkeypatch):
    folder = write_shards(tmp_path / "a")
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)  # root may write anywhere
    tar(folder)
    assert not list(folder.glob(".*"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".train.index", ".val.index"}
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_one_process_of_a_node_makes_the_index_and_an_error_reaches_all(tmp_path, monkeypatch):
    def find(world):
        looked, look = [], shards.look_through
        shards.look_through = lambda paths: looked.append(1) or look(paths)
        try:
            load_data(options("tar", tmp_path / "a", image_size=32), world)
        except UserError as error:
            return str(error).splitlines()[0]
        return len(looked)

    write_shards(tmp_path / "a")
    assert fork_ranks(3, find) == [2, 0, 0]
    (tmp_path / "a/val-000.tar").write_bytes(b"no tar" * 999)
    said = fork_ranks(3, find)
    assert len(set(said)) == 1 and "val-000.tar is damaged" in said[0]


@pytest.mark.parametrize("spoil, said", [
    (lambda content: content[:len(content) // 2], "damaged"), (lambda content: content[:1500], "damaged"),
    (lambda content: b"", "damaged"), (lambda content: content.rstrip(b"\0") + bytes(509), "damaged"),
    (lambda content: content[:1024] + b"x" * 512 + content[1536:], "damaged"),
    (lambda content: content[:6144] + b"x" * 512 + content[6656:], "damaged"),
    (lambda content: content + content, "neither a file nor the end"),
    (lambda content: content.replace(b"0\n" + bytes(9), b"cat" + bytes(8)), "holds b'ca'"),
])
def test_a_shard_that_is_damaged_is_named(tmp_path, spoil, said):
    folder = write_shards(tmp_path / "a")
    path = folder / "train-001.tar"
    path.write_bytes(spoil(path.read_bytes()))
    text = refusal("tar", folder, image_size=32)
    assert said in text and "train-001.tar" in text


@pytest.mark.parametrize("files, said", [
    ([("1.png", b"")], "sample 1 of"), ([("1.cls", b"0")], "has no image"),
    ([("1.png", b""), ("1.cls", b"-1")], "holds b'-1'"), ([("1.png", b""), ("1.cls", b"0")], "not an image"),
    ([("1.png", b""), ("1.json", b'{"text": "x"}')], "holds"),
    ([("1.png", b""), ("1.json", b"[" * 100_000)], "holds b'[[")])
def test_samples_that_are_none_are_refused(tmp_path, files, said):
    folder = write_shards(tmp_path / "a")
    write_tar(folder / "train-000.tar", files)
    assert said in refusal("tar", folder, image_size=32)


def test_a_shard_that_changes_while_it_is_used_is_noticed(tmp_path):
    data = tar(write_shards(tmp_path / "a"))
    write_tar(tmp_path / "a/train-002.tar", [("7.png", picture(7)), ("7.cls", b"1")])
    with pytest.raises(UserError, match="train-002.tar has changed"):
        data.train.fetch([9])
    assert len(data.train.fetch([3])[1]) == 1


