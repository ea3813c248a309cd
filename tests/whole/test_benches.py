"""The benches compare like with like."""

import json
import sys
from types import SimpleNamespace

import pytest
from jobs import ROOT

from common.models import build_model
from common.options import Options

sys.path.append(f"{ROOT}/tests/bench")
loops = pytest.importorskip("loops")
peers = pytest.importorskip("peers")


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


@pytest.mark.parametrize(
    "again, lost, missed, repeated",
    [
        ([2, [2, 3]], 1, 2, 0),  # a step is made again, and the last one is not made
        ([3, [4, 5]], 0, 0, 0),
        ([3, [2, 3]], 0, 2, 2),  # it resumes at the wrong place
        ([1, [4, 5]], 2, 4, 0),
    ],
)
def test_of_peers_the_samples_count_that_the_last_life_builds_on(
    tmp_path, monkeypatch, again, lost, missed, repeated
):
    """In the first life two processes make two steps, and one begins a third."""
    monkeypatch.setattr(peers, "SAMPLES", 6)
    first = [[1, [0]], [1], [2, [2]], [2], [3, [4]]]
    second = [[1, [1]], [1], [2, [3]]]  # killed in a step that the other one has made
    last = [again, again[:1], [4, [4, 5]]]
    for number, (life, lines) in enumerate((("0.0", first), ("0.0", second), ("0.1", last))):
        text = "".join(json.dumps([life, *line]) + "\n" for line in lines)
        (tmp_path / f"notes-{number}").write_text(text)
    assert peers.count(tmp_path) == (lost, missed, repeated)
