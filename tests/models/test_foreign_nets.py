"""Nets of Hugging Face and timm, built from their configurations, train as they are."""
import json

import pytest
import torch
from jobs import audit
from test_bitwise import run, through_kills
from torch.utils.data import Dataset

WORDS, TAGS = 30, 3


class Sentences(Dataset):
    """What a tokenizer makes: dicts of unequal lengths."""

    classes, vocab = TAGS, WORDS

    def __init__(self, n, kind):
        self.n, self.kind, self.fingerprint = n, kind, f"{kind} {n}"

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        length = 8 if self.kind == "windows" else int(torch.randint(3, 9, (), generator=draw))
        words = torch.randint(1, WORDS, (length + 1,), generator=draw)
        if self.kind == "windows":
            return words[:-1], words[1:]
        return {"input_ids": words, "labels": int(words[0]) % TAGS if self.kind == "classes" else words}

    def collate(self, samples):
        if self.kind == "windows":
            return tuple(map(torch.stack, zip(*samples, strict=True)))
        words = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], True)
        batch = {"input_ids": words, "attention_mask": (words != 0).long()}
        if self.kind == "classes":
            return batch | {"labels": torch.tensor([s["labels"] for s in samples])}
        labels = words.masked_fill(words == 0, -100)
        return batch | {"labels": labels, "decoder_input_ids": words.roll(1, 1)}


def windows():
    return Sentences(16, "windows"), Sentences(20, "windows")


def classes():
    return Sentences(16, "classes"), Sentences(20, "classes")


def pairs():
    return Sentences(16, "pairs"), Sentences(20, "pairs")


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, hidden_size=16, intermediate_size=32,
                                        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1))


def bert():
    from transformers import BertConfig, BertForSequenceClassification
    net = BertForSequenceClassification(BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=TAGS))
    return net


def t5():
    from transformers import T5Config, T5ForConditionalGeneration
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2,
                                               num_heads=2, decoder_start_token_id=0))


def through_a_kill(folder, **flags):
    """The evaluation; two ranks, of which one is killed, and then three end with one process's digest."""
    given = flags | {"virtual_ranks": 4, "global_batch_size": 8, "epochs": 1, "workers": 0, "audit": True}
    unbroken = run(folder / "unbroken", 1, given)
    assert through_kills(folder / "killed", given, [(2, 1, 2, "within")], 3) == unbroken
    for name in ("unbroken", "killed"):
        assert audit(folder / name) == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
    return json.loads(unbroken[1].splitlines()[-1])


@pytest.mark.parametrize("net, data, task", [("gpt2", "windows", "tokens"), ("llama", "windows", "tokens"),
                                             ("bert", "classes", "classify"), ("t5", "pairs", "tokens")])
def test_nets_of_hugging_face_train_unedited(net, data, task, tmp_path):
    pytest.importorskip("transformers")
    globals()[net]()  # imported here, once and not in every rank
    found = through_a_kill(tmp_path, model=f"{__file__}:{net}", dataset=f"{__file__}:{data}", task=task)
    assert ("val_perplexity" in found) == (task == "tokens") and found["val_loss"] > 0


TIMM = """
import timm, torch
def vit(data):
    return timm.create_model("vit_tiny_patch16_224", num_classes=data.classes, img_size=32, patch_size=8,
                             embed_dim=24, depth=2, num_heads=2)
def mobilenet(data):
    return timm.create_model("mobilenetv3_small_050", num_classes=data.classes, drop_path_rate=0.1)
def data():
    x, y = torch.rand(36, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(36) % 3
    return x[:16], y[:16], x[16:], y[16:]
"""


@pytest.mark.parametrize("name", ["vit", "mobilenet"])
def test_nets_of_timm_train_unedited(name, tmp_path):
    pytest.importorskip("timm")
    (tmp_path / "own.py").write_text(TIMM)
    through_a_kill(tmp_path, model=f"{tmp_path}/own.py:{name}", dataset=f"{tmp_path}/own.py:data")
