"""Datasets as people write them by mistake: nothing wrong is trained on in silence, and nothing hangs."""
import io
import os
import tarfile

import pytest
import torch
from ranks import fork_ranks
from test_bitwise import run
from test_datasets import ALONE, load, options, refusal
from test_own_data import write_images
from test_shards import picture, tar, write_shards, write_tar
from test_tokens import write

from common.data import batches, load_data
from common.errors import UserError
from common.sampler import ElasticSampler

HEAD = """
import numpy as np
import os
import torch
from torch.utils.data import *

class Rows(Dataset):
    classes = 3
    def __init__(self, n, **facts): self.n = n; vars(self).update(facts)
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.rand(6, generator=torch.Generator().manual_seed(i)), i % 3

class Dicts(Rows):
    def __getitem__(self, i): return {"x": Rows.__getitem__(self, i)[0], "labels": self.label(i)}

def loss(net, batch): return {"loss": (net(batch[0]).sum(), len(batch[0]))}
def net(data): return torch.nn.Linear(6, 3)
"""


def mine(folder, text, name="mine"):
    (folder / f"{name}.py").write_text(HEAD + text)
    return f"{folder}/{name}.py:make"


def told(folder, text, task="classify", workers=0):
    """What is said of a dataset at the start, or in its first epoch."""
    opts = options(mine(folder, text + "\ndef make(): return It(20), It(8)\n"), workers=workers,
                   task=f"{folder}/mine.py:{task}" if task != "classify" else task)
    with pytest.raises(UserError) as caught:
        data = load_data(opts, ALONE)
        list(batches(data.train, ElasticSampler(data.train, 4), opts))
    assert caught.value.code == 2 and len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


@pytest.mark.parametrize("text, said", [
    ("class It(Dicts):\n def label(s, i): return -100 if i else 1",
     "targets of torch.int64 from -100 on"),
    ("class It(Dicts):\n def label(s, i): return 0.5",
     "targets of torch.float32"),
    ("class It(Dicts):\n def label(s, i): return np.int32(1)",
     "targets of torch.int32"),
    ("class It(Dicts):\n def label(s, i): return i", "a target is"),
    ("class It(Rows):\n def collate(s, b): return default_collate([x for x in b if x[1] < 2])",
     "4 samples became a batch of"),
    ("class It(Rows):\n fingerprint = 'a'\n def fetch(s, ids, epoch, augment):\n"
     "  return default_collate([s[i] for i in ids if i != 7])", "4 samples became a batch of"),
    ("class It(Rows):\n def collate(s, b): pass", "is None"),
    ("class It(Rows):\n fingerprint = 'a'\n def fetch(s, ids, epoch, augment): pass", "is None"),
    ("class It(Rows):\n def __getitem__(s, i): return torch.ones(6).to_sparse(), 1", "cannot be stacked"),
    ("class It(Rows):\n def __getitem__(s, i): return torch.ones(6, device='meta'), 1", "cannot be stacked"),
])
def test_a_batch_of_which_the_mean_would_be_wrong_is_refused(tmp_path, text, said):
    assert said in told(tmp_path, text)


def test_samples_that_are_views_of_one_buffer_are_refused_where_they_would_become_equal(tmp_path):
    text = ("class It(Rows):\n memory = torch.zeros(6)\n def __getitem__(s, i):\n"
            "  x, y = Rows.__getitem__(s, i)\n  return s.memory.copy_(x), y")
    assert "sample 0 changes when another one is read" in told(tmp_path, text, "loss")
    data = load(mine(tmp_path, text + "\ndef make(): return It(20), It(8)\n"))  # each is copied at once
    assert len({float(x[0]) for x in data.train.fetch([0, 1, 2])[0]}) == 3


def test_with_bad_samples_skip_a_collate_may_leave_samples_out(tmp_path):
    text = "class It(Rows):\n def collate(s, b): return default_collate([x for x in b if x[1] < 2] or b[:1])"
    data = load(mine(tmp_path, text + "\ndef make(): return It(20), It(8)\n"), bad_samples="skip")
    assert len(data.train.fetch([0, 1, 2, 3])[1]) == 3


@pytest.mark.parametrize("text, samples", [
    ("def make(): return Subset(Rows(20, weights=np.arange(20) % 2), range(10)), Rows(8)", {1, 3, 5, 7, 9}),
    ("def make(): return Subset(Subset(Rows(20, weights=[0, 1] * 10), range(10)), [1, 2]), Rows(8)", {0}),
    ("def make():\n a = TensorDataset(torch.rand(20, 6), torch.arange(20) % 3)\n"
     " a.weights = torch.arange(20, dtype=torch.float16, requires_grad=True) // 18\n return a, a", {18, 19}),
])
def test_weights_take_effect_in_a_subset_and_beside_tensors(tmp_path, text, samples):
    assert {id for ids in ElasticSampler(load(mine(tmp_path, text)).train, 4) for id in ids} == samples


def test_a_users_kind_of_tensor_dataset_returns_its_own_samples(tmp_path):
    data = load(mine(tmp_path, "class It(TensorDataset):\n def __getitem__(s, i):\n"
                     "  return s.tensors[0][i] + 7, s.tensors[1][i]\n"
                     "def make(): a = It(torch.zeros(9, 6), torch.arange(9) % 3); return a, a\n"))
    assert data.train.fetch([4])[0].tolist() == [[7.0] * 6] and data.train.classes is None


def test_the_number_of_classes_may_be_one_of_numpy(tmp_path):
    assert load(mine(tmp_path, "def make(): return Rows(9, classes=np.int64(4)), Rows(9)\n")).classes == 4
    assert "`classes`" in refusal(mine(tmp_path, "def make(): return Rows(9, classes=2.5), Rows(9)\n", "two"))


def test_the_length_of_a_dataset_is_asked_for_once(tmp_path):
    data = load(mine(tmp_path, "class It(Rows):\n def __len__(s): s.n -= 1; return s.n\n"
                     "def make(): return It(40), It(40)\n"))
    assert len({len(data.train) for _ in range(5)}) == 1 == len({len(data.test) for _ in range(5)})


def test_ranks_that_see_datasets_of_other_lengths_are_refused(tmp_path, capfd):
    name = mine(tmp_path, "def make():\n n = 20 + int(os.environ['RANK'])\n"
                " return Rows(n, fingerprint='x'), Rows(8)\n")
    with pytest.raises(AssertionError, match="rank 0, exit code 2"):
        run(tmp_path / "run", 2, {"dataset": name, "model": f"{tmp_path}/mine.py:net", "workers": 0})
    assert "samples" in capfd.readouterr().err


def test_a_sample_that_is_another_one_each_time_is_told(tmp_path, capfd):
    load(mine(tmp_path, "class It(Rows):\n draw = np.random.default_rng()\n"
              " def __getitem__(s, i): return s.draw.random(6), 1\ndef make(): return It(9), It(9)\n"))
    assert "sample 0 is another one each time it is read" in capfd.readouterr().err
    load(mine(tmp_path, "class It(Rows):\n def __getitem__(s, i): return np.random.rand(6), 1\n"
              "def make(): return It(9), It(9)\n", "two"))
    assert not capfd.readouterr().err


@pytest.mark.parametrize("text, said", [
    ("class It(Rows):\n def collate(s, b): return {'x': default_collate(b), 'f': lambda: 1}",
     "cannot leave its loading process"),
    ("class It(Rows):\n def collate(s, b): return (x for x in b)", "cannot leave its loading process")])
def test_a_batch_that_cannot_leave_its_loading_process_is_an_error_and_no_wait(tmp_path, text, said):
    def find(world):
        return told(tmp_path, text, "loss", workers=1)

    assert said in fork_ranks(1, find, deadline=30)[0]


@pytest.mark.parametrize("task", ["classify", "loss"])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_with_a_gradient_lose_it(tmp_path, task, workers):
    name = mine(tmp_path, "class It(Rows):\n def __getitem__(s, i):\n  x, y = Rows.__getitem__(s, i)\n"
                "  return x.requires_grad_() * 2, y\ndef make(): return It(20), It(8)\n")
    opts = options(name, workers=workers, task=task if task == "classify" else f"{tmp_path}/mine.py:loss")

    def find(world):
        data = load_data(opts, ALONE)
        return [batch.x.requires_grad for batch in batches(data.train, ElasticSampler(data.train, 8), opts)]

    assert fork_ranks(1, find, deadline=30) == [[False] * 3]


def test_a_fetch_that_draws_is_seeded_and_moves_no_generator_of_the_training(tmp_path):
    name = mine(tmp_path, "class It(Rows):\n fingerprint, in_memory = 'a', False\n def fetch(s, ids, *_):\n"
                "  return torch.rand(len(ids), 6), torch.tensor(ids) % 3\n"
                "def make(): return It(20), It(8)\n")

    def find(world, workers):
        opts = options(name, workers=workers, virtual_ranks=4)
        data = load_data(opts, ALONE)
        before = torch.get_rng_state()
        order = ElasticSampler(data.train, 8, slices=4)
        found = [x.tolist() for batch in batches(data.train, order, opts) for _, part in batch.parts if part
                 for x in part[0]]
        return found, torch.equal(before, torch.get_rng_state())

    alone, loaded = (fork_ranks(1, find, workers, deadline=30)[0] for workers in (0, 2))
    assert alone == loaded and alone[1]


def test_a_pipe_among_the_pictures_is_named_and_not_waited_for(tmp_path):
    pytest.importorskip("torchvision")
    os.mkfifo(write_images(tmp_path) / "train/cat/9.png")

    def find(world):
        with pytest.raises(UserError, match="9.png is not an image"):
            load("imagefolder", tmp_path).train.fetch([3])
        return True

    assert fork_ranks(1, find, deadline=20) == [True]


# ---- files -------------------------------------------------------------------------------------------
def test_inputs_and_targets_of_tokens_share_no_memory(tmp_path):
    write(tmp_path, train=200, val=100, vocab=30)
    x, y = load("tokens:16", tmp_path, vocab_size=30).train.fetch([2])
    wanted = y.clone()
    x[:] = 0  # a task may mask words in place
    assert torch.equal(y, wanted)


def test_a_meta_json_of_a_million_brackets_is_refused(tmp_path):
    write(tmp_path, train=200, val=100, vocab=30)
    (tmp_path / "meta.json").write_text("[" * 1_000_000)
    assert "is no JSON object" in refusal("tokens:16", tmp_path)


def entry(kind, **facts):
    info = tarfile.TarInfo("2.png")
    info.type = kind
    for name, value in facts.items():
        setattr(info, name, value)
    return info


@pytest.mark.parametrize("info", [
    entry(tarfile.LNKTYPE, linkname="1.png"), entry(tarfile.SYMTYPE, linkname="1.png"),
    entry(tarfile.REGTYPE, pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "9"})])
def test_a_link_or_a_sparse_file_among_shards_is_refused(tmp_path, info):
    folder = write_shards(tmp_path / "a")
    with tarfile.open(folder / "train-000.tar", "w", format=tarfile.PAX_FORMAT) as shard:
        for name, content in (("1.png", picture(1)), ("1.cls", b"1"), ("2.cls", b"0")):
            plain = tarfile.TarInfo(name)
            plain.size = len(content)
            shard.addfile(plain, io.BytesIO(content))
        shard.addfile(info, io.BytesIO())
    assert "2.png in" in refusal("tar", folder, image_size=32)


def test_two_images_of_one_sample_are_refused_and_names_differ_by_their_case(tmp_path):
    folder = write_shards(tmp_path / "a")
    write_tar(folder / "train-000.tar", [("1.png", picture(1)), ("1.cls", b"1"), ("1.PNG", picture(2))])
    assert "1.PNG in" in refusal("tar", folder, image_size=32)
    write_tar(folder / "train-000.tar", [(f"{name}.{kind}", content) for number, name in enumerate("aA")
                                         for kind, content in (("png", picture(number)), ("cls", b"1"))])
    assert len(tar(folder).train) == 10


def test_a_picture_may_have_a_name_of_any_bytes(tmp_path):
    pytest.importorskip("torchvision")
    folder = write_images(tmp_path)
    odd = os.fsencode(folder / "train/cat") + b"/\xe9t\xe9.png"
    os.link(folder / "train/cat/0.png", odd)
    assert len(load("imagefolder", folder).train) == 7
