"""The benches compare like with like."""

import sys
from types import SimpleNamespace

import pytest
from jobs import ROOT

from common.models import build_model
from common.options import Options

sys.path.append(f"{ROOT}/tests/bench")
loops = pytest.importorskip("loops")


@pytest.mark.parametrize("name", loops.ROWS)
def test_a_loop_by_hand_has_the_net_that_train_ddp_trains_but_for_the_row_that_compares_two(name):
    row = loops.ROWS[name]
    shape = (loops.LENGTH,) if row.net == "gpt" else row.shape[1:]
    data = SimpleNamespace(name=name, vocab=loops.VOCAB, classes=loops.VOCAB, sample_shape=shape)
    if row.net != "gpt":
        data.classes = 10
    model = f"gpt:{loops.SIZE}" if row.net == "gpt" else row.net
    ours = repr(build_model(Options(model=model), data))
    assert (repr(loops.net_of(row)) == ours) != row.tutorial
