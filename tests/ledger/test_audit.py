"""The audit proves that no sample was lost or repeated, from the logs of all ranks; doctored logs show it can
fail.
"""

import json

import pytest
from jobs import CLEAN
from refusals import refusal

from common.extras.audit import Audit, audit
from common.extras.report import main
from common.ledger import Ledger
from common.sampler import ElasticSampler

N, BATCH, SEED = 50, 8, 3  # 7 steps an epoch, the last with 2 samples


def live(run, life, world, resumed, until, behind=0, dies_in=None, n=N, at=None):
    """Write what a life of `world` ranks writes that resumes at one step and finishes step `until`.

    The last `behind` ranks do not finish step `until`; in step `dies_in` all ranks begin and none finishes.
    `at`: its epoch and position, if they are not those of an unbroken run.
    """
    steps = -(-n // BATCH)
    epoch, position = at or (resumed // steps, resumed % steps * BATCH)
    Ledger(run).event(
        "life",
        life=life,
        world=world,
        step=resumed,
        epoch=epoch,
        position=position,
        n=n,
        seed=SEED,
        global_batch_size=BATCH,
    )
    for rank in range(world):
        log = Audit(run, life, rank)
        order = ElasticSampler(n, BATCH, rank, world, SEED)
        step = resumed
        for each in range(epoch, 5):
            order.set_epoch(each, position if each == epoch else 0)
            for ids in order:
                step += 1
                if step <= max(until, dies_in or 0):
                    log.begin(step, ids)
                    if step <= until - (rank >= world - behind):
                        log.done(step)


@pytest.fixture
def run(tmp_path):
    """A clean history: three lives, 2 -> 3 -> 1 ranks, each broken off in the middle of a step."""
    live(tmp_path, "aa", world=2, resumed=0, until=9, behind=1, dies_in=10)
    live(tmp_path, "bb", world=3, resumed=9, until=16, dies_in=17)
    live(tmp_path, "cc", world=1, resumed=16, until=20, dies_in=21)
    return tmp_path


@pytest.mark.parametrize(
    "lives, expected",
    [
        # (world, resumed, until, and of the broken ones: behind or dies_in)
        ([(4, 0, 15), (2, 15, 15)], {}),  # complete, again
        ([(2, 0, 4, 0, 5), (2, 5, 9)], {}),  # a rescued step counts, though no rank lived to note its end
        ([(2, 0, 4, 0, 5), (2, 5, 5), (2, 3, 6)], {"lost": 2, "redone": 2}),
        ([(2, 0, 9, 1), (3, 6, 7), (3, 5, 12)], {"lost": 5, "redone": 5}),  # 7 8 9 and 6 7
        ([(2, 0, 9), (2, 6, 6)], {"lost": 3}),
        ([(2, 0, 4), (2, 6, 7)], {"unproven": [5, 6]}),
    ],
)
def test_lost_and_redone_steps_are_counted_and_what_was_not_noted_is_unproven(tmp_path, lives, expected):
    for number, facts in enumerate(lives):
        live(tmp_path, f"life{number}", *facts)
    assert audit(tmp_path) == CLEAN | expected


@pytest.mark.parametrize(
    "rank, step, change, expected",
    [
        ("bb/rank1", 12, lambda ids: [ids[1:]], {"missed": 1, "wrong": [12]}),
        ("bb/rank1", 12, lambda ids: [[*ids, ids[0]]], {"repeated": 1, "wrong": [12]}),
        ("cc/rank0", 18, lambda ids: [ids, ids], {"repeated": BATCH, "wrong": [18]}),
        ("cc/rank0", 18, lambda ids: [], {"unproven": [18]}),
    ],
)
def test_a_doctored_note_is_found(run, rank, step, change, expected):
    """`change` gets the ids of the note and returns lists of ids in its place."""
    assert audit(run) == CLEAN
    path = run / f"audit/{rank}.jsonl"
    lines = path.read_text().splitlines()
    begins = f'{{"event": "begin", "step": {step}, "ids": '
    (at,) = [number for number, line in enumerate(lines) if line.startswith(begins)]
    lines[at : at + 1] = [f"{begins}{ids}}}" for ids in change(json.loads(lines[at])["ids"])]
    path.write_text("\n".join(lines))
    assert audit(run) == CLEAN | expected
    assert main([str(run), "--audit"]) == 1


def test_torn_and_damaged_lines_prove_nothing_and_a_copy_of_a_file_counts_no_sample_twice(run):
    path = run / "audit/cc/rank0.jsonl"
    text = path.read_text()
    damaged = '{"event": "begin", "ids": [1]}\n{"event": "begin", "step": 17}\n' + "[" * 100_000 + "\n"
    torn = '{"event": "begin", "step": 22, "ids": [1, 2'
    path.write_text(damaged + text + torn)
    path.with_name("rank0 (copy).jsonl").write_text(text)
    assert audit(run) == CLEAN
    Ledger(run).event("save", step=20)
    path.write_text(damaged)
    assert audit(run) == CLEAN | {"unproven": [17, 18, 19, 20]}


def test_nodes_with_folders_of_their_own_are_audited_together(run, tmp_path):
    other = tmp_path / "node1"
    for path in (run / "audit").glob("*/rank1.jsonl"):
        there = other / path.relative_to(run)
        there.parent.mkdir(parents=True)
        path.rename(there)
    assert {*audit(run)} == {*CLEAN, "unproven"}
    assert main([str(run), str(other), str(run), "--audit"]) == 0, "a folder counts once"


def test_what_cannot_be_audited_is_refused_in_words(tmp_path):
    with refusal("holds no life"):
        audit(tmp_path)
    Ledger(tmp_path).event("life", life="aa", world=1, step=0)
    Audit(tmp_path, "aa", 0).begin(1, [1])  # no step was finished
    with refusal("train with --audit, or Elastic"):
        audit(tmp_path)
