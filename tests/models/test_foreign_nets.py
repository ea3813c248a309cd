"""Nets of Hugging Face, built from their configurations, train as they are, through kills."""

import json

import pytest
import torch
from test_bitwise import run, through_kills
from torch.utils.data import Dataset

WORDS = 30


class Windows(Dataset):
    """Sentences of one length; to be predicted: the next word."""

    classes = vocab = WORDS

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def words(self, i, length):
        return torch.randint(1, WORDS, (length,), generator=torch.Generator().manual_seed(i))

    def __getitem__(self, i):
        words = self.words(i, 9)
        return words[:-1], words[1:]


class Sentences(Windows):
    """What a tokenizer makes: dicts of unequal lengths; to be predicted: a class."""

    classes = 3

    def __getitem__(self, i):
        return self.words(i, 3 + i % 6)

    def collate(self, samples):
        words = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": words[:, 0] % 3}


def windows():
    return Windows(16), Windows(20)


def sentences():
    return Sentences(16), Sentences(20)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=3,
        )
    )


@pytest.mark.parametrize(
    "library, net, data, task",
    [
        ("transformers.models.gpt2.modeling_gpt2", "gpt2", "windows", "tokens"),
        ("transformers.models.bert.modeling_bert", "bert", "sentences", "classify"),
    ],
)
def test_nets_of_other_libraries_train_and_a_kill_leaves_no_trace(library, net, data, task, tmp_path):
    pytest.importorskip(library)  # here, once, and not in each rank
    given = {
        "model": f"{__file__}:{net}",
        "dataset": f"{__file__}:{data}",
        "task": task,
        "virtual_ranks": 4,
        "global_batch_size": 8,
        "epochs": 1,
        "workers": 0,
    }
    unbroken = run(tmp_path / "unbroken", 1, given)
    assert through_kills(tmp_path / "killed", given, [(2, 1, 2, "within")], 3) == unbroken
    metrics = json.loads(unbroken[1].splitlines()[-1])
    assert ("val_perplexity" in metrics) == (task == "tokens") and metrics["val_loss"] > 0
