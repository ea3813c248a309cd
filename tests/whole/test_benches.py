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
    if row.net == "gpt":
        data = SimpleNamespace(
            name=name, vocab=loops.VOCAB, classes=loops.VOCAB, sample_shape=(loops.LENGTH,)
        )
        model = f"gpt:{loops.SIZE}"
    else:
        data = SimpleNamespace(name=name, classes=10, sample_shape=row.shape[1:])
        model = row.net
    ours = build_model(Options(model=model), data)
    assert (repr(loops.net_of(row)) == repr(ours)) != row.tutorial
