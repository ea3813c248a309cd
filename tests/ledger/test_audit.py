"""The audit proves that no sample was lost or repeated, from the logs of all ranks; doctored logs show it can
fail.
"""
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from common.ledger import Audit, Ledger, audit, summarize
from common.ledger.__main__ import main
from common.sampler import ElasticSampler

N, BATCH, SEED = 50, 8, 3  # 7 steps an epoch, the last with 2 samples
HOUSE = Path(__file__).parents[2]
CLEAN = {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}


def live(run, life, world, resumed, until, behind=0, dies_in=None, **fields):
    """Write what a life of `world` ranks writes that resumes at one step and finishes step `until`.

    The last `behind` ranks do not finish step `until`; in step `dies_in` everybody begins and nobody
    finishes.
    """
    per_epoch = -(-N // BATCH)
    epoch, batch = divmod(resumed, per_epoch)
    Ledger(run).event("life", life=life, world=world, restart=0, step=resumed, epoch=epoch,
                      position=batch * BATCH,
                      pids=[1] * world, n=N, seed=SEED, global_batch_size=BATCH, **fields)
    for rank in range(world):
        log, order, step = Audit(run, life, rank), ElasticSampler(N, BATCH, rank, world, SEED), 0
        for epoch in range(4):
            order.set_epoch(epoch)
            for number, ids in enumerate(order):
                step += 1
                if resumed < step <= max(until, dies_in or 0):
                    log.begin(step, epoch, number * BATCH, ids)
                    if step <= until - (rank >= world - behind):
                        log.done(step)
        log.lines.close()


@pytest.fixture
def run(tmp_path):
    """A clean history: three lives, 2 -> 3 -> 1 ranks, two of them broken off in the middle of a step."""
    live(tmp_path, "aa", world=2, resumed=0, until=9, behind=1, dies_in=10)
    live(tmp_path, "bb", world=3, resumed=9, until=16, dies_in=17)
    live(tmp_path, "cc", world=1, resumed=16, until=20)
    return tmp_path


def doctor(run, life, rank, change):
    """Rewrite one audit file: `change` gets each record and returns the records to put in its place."""
    path = run / "audit" / f"life-{life}-rank{rank}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(new) + "\n" for old in records for new in change(old)))


def at(step, event, replace):
    return lambda record: replace(record) if (record["step"], record["event"]) == (step, event) else [record]


def test_a_clean_history_of_many_worlds_has_nothing_missed_or_repeated(run):
    assert audit(run) == CLEAN


def test_a_single_life_and_a_relaunch_of_a_finished_run_are_clean(tmp_path):
    live(tmp_path, "aa", world=4, resumed=0, until=15)
    assert audit(tmp_path) == CLEAN
    live(tmp_path, "bb", world=2, resumed=15, until=15)
    assert audit(tmp_path) == CLEAN


def test_more_ranks_than_samples_is_clean(tmp_path):
    live(tmp_path, "aa", world=11, resumed=0, until=8)
    assert audit(tmp_path) == CLEAN


def test_a_rescued_step_counts_even_if_nobody_lived_to_write_that_it_was_done(tmp_path):
    live(tmp_path, "aa", world=2, resumed=0, until=4, dies_in=5)
    live(tmp_path, "bb", world=2, resumed=5, until=9)
    assert audit(tmp_path) == CLEAN


def test_a_rescued_step_that_was_made_again_is_redone(tmp_path):
    live(tmp_path, "aa", world=2, resumed=0, until=4, dies_in=5)
    live(tmp_path, "bb", world=2, resumed=5, until=5)
    live(tmp_path, "cc", world=2, resumed=3, until=6)
    assert audit(tmp_path) == {**CLEAN, "lost": 2, "redone": 2}


def test_a_life_that_repeats_a_step_it_had_resumed_past_has_repeated_its_samples(run):
    taken = []
    doctor(run, "aa", 0, lambda r: [taken.append(r) or r] if r["step"] == 8 else [r])
    log = Audit(run, "bb", 0)
    for record in taken:
        log.lines.append(record)
    assert audit(run) == {**CLEAN, "repeated": 4, "redone": 1}


def test_a_dropped_sample_is_missed(run):
    doctor(run, "bb", 1, at(12, "begin", lambda r: [{**r, "ids": r["ids"][1:]}]))
    assert audit(run) == {**CLEAN, "missed": 1}


def test_a_sample_trained_on_twice_is_repeated(run):
    doctor(run, "bb", 1, at(12, "begin", lambda r: [{**r, "ids": r["ids"] + r["ids"][:1]}]))
    assert audit(run) == {**CLEAN, "repeated": 1}


def test_a_wrong_sample_is_one_missed_and_one_repeated(run):
    doctor(run, "aa", 0, at(3, "begin", lambda r: [{**r, "ids": [(r["ids"][0] + 1) % N, *r["ids"][1:]]}]))
    assert {k: v for k, v in audit(run).items() if v} == {"missed": 1, "repeated": 1}


def test_samples_of_another_step_are_not_taken_for_the_right_ones(run):
    taken = []
    doctor(run, "cc", 0, at(18, "begin", lambda r: [taken.append(r["ids"]) or r]))
    doctor(run, "cc", 0, at(19, "begin", lambda r: [{**r, "ids": taken[0]}]))
    assert audit(run) == {**CLEAN, "missed": 8, "repeated": 8}


def test_a_missing_step_is_missed_whole(run):
    for rank in range(3):
        doctor(run, "bb", rank, lambda r: [] if r["step"] == 13 else [r])
    assert audit(run) == {**CLEAN, "missed": BATCH}


def test_a_step_done_twice_in_one_life_is_redone_and_repeated(run):
    for rank in range(3):
        for event in ("begin", "done"):
            doctor(run, "bb", rank, at(13, event, lambda r: [r, r]))
    assert audit(run) == {**CLEAN, "repeated": BATCH, "redone": 1}


def test_a_life_that_resumed_before_what_was_done_has_lost_and_redone_steps_but_no_samples(tmp_path):
    live(tmp_path, "aa", world=2, resumed=0, until=9, behind=1)
    live(tmp_path, "bb", world=3, resumed=6, until=7)
    live(tmp_path, "cc", world=3, resumed=5, until=12)
    # 7 8 9 and 6 7, though 7 was made three times
    assert audit(tmp_path) == {**CLEAN, "lost": 3 + 2, "redone": 3 + 2}


def test_steps_lost_and_never_made_again_are_lost_and_not_redone(tmp_path):
    live(tmp_path, "aa", world=2, resumed=0, until=9)
    live(tmp_path, "bb", world=2, resumed=6, until=6)
    assert audit(tmp_path) == {**CLEAN, "lost": 3}


def test_steps_that_no_notes_reach_up_to_are_unproven(tmp_path):
    live(tmp_path, "aa", world=2, resumed=0, until=4)
    live(tmp_path, "bb", world=2, resumed=6, until=7)
    assert audit(tmp_path) == {**CLEAN, "unproven": [5, 6]}


def test_a_life_that_forgot_the_position_has_missed_and_repeated(tmp_path):
    """What torch's ElasticDistributedSampler does: after a restart the epoch is cut anew."""
    live(tmp_path, "aa", world=2, resumed=0, until=3)
    Ledger(tmp_path).event("life", life="bb", world=1, step=3, n=N, seed=SEED, global_batch_size=BATCH)
    log = Audit(tmp_path, "bb", 0)
    for step, ids in enumerate(ElasticSampler(N, BATCH, seed=SEED), start=4):
        log.begin(step, 0, 0, ids)
        log.done(step)
    found = audit(tmp_path)
    assert found["missed"] > 0 and found["repeated"] > 0


def test_a_torn_last_line_is_no_line(run):
    path = run / "audit" / "life-cc-rank0.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"event": "begin", "step": 21, "ids": [1, 2')  # died while beginning a step
    assert audit(run) == CLEAN
    path.write_text(whole[:-5])  # the last done-line: as far as anybody knows, the lineage ends at 19
    assert audit(run) == CLEAN
    lines = whole.splitlines()
    # the begin-line of a step that was finished
    path.write_text("\n".join([*lines[:-2], lines[-2][:-5], lines[-1]]))
    assert audit(run) == {**CLEAN, "unproven": [20]}


@pytest.mark.parametrize("damage", ["step", "x", "ids"])
def test_a_damaged_line_leaves_its_step_unproven_and_not_missed(run, damage):
    """A file may hold anything: other kinds of values, and steps that no loop could count to."""
    def change(record):
        if record["step"] == 18:
            record |= {"ids": {"step": None, "x": ["x"], "ids": [1e30]}[damage]} | (
                {"step": 10**30} if damage == "step" else {})
        return [record]
    doctor(run, "cc", 0, change)
    assert audit(run) == {**CLEAN, "unproven": [18]}


def test_lines_that_a_full_disk_did_not_take_are_unproven_and_not_missed(tmp_path, monkeypatch):
    Ledger(tmp_path).event("life", life="aa", world=1, step=0, n=N, seed=SEED, global_batch_size=BATCH)
    log, write = Audit(tmp_path, "aa", 0), os.write

    def full(fd, line):
        if 3 <= step <= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, line)
    monkeypatch.setattr(os, "write", full)
    for step, ids in enumerate(ElasticSampler(N, BATCH, seed=SEED), start=1):
        log.begin(step, 0, 0, ids)
        log.done(step)
    assert audit(tmp_path) == {**CLEAN, "unproven": [3, 4]}


@pytest.mark.parametrize("rank", ["0 (copy)", "00", "-1", "x", "", "7"])
def test_a_copy_of_an_audit_file_under_another_name_is_not_counted(run, rank):
    text = (run / "audit" / "life-cc-rank0.jsonl").read_text()
    (run / "audit" / f"life-cc-rank{rank}.jsonl").write_text(text)
    assert audit(run) == CLEAN


def test_what_the_missing_file_of_a_rank_would_tell_is_unproven_and_not_missed(run):
    (run / "audit" / "life-bb-rank2.jsonl").unlink()
    found = audit(run)
    assert found == {**CLEAN, "unproven": found["unproven"]} and set(found["unproven"]) <= set(range(10, 17))


def test_the_missing_files_of_a_life_leave_it_unproven_up_to_its_last_save(run):
    Ledger(run).event("save", step=20)
    (run / "audit" / "life-cc-rank0.jsonl").unlink()
    assert audit(run) == {**CLEAN, "unproven": [17, 18, 19, 20]}


def test_a_file_that_ends_early_leaves_its_steps_unproven_and_says_so_with_exit_code_1(run, capsys):
    doctor(run, "cc", 0, lambda r: [r] if r["step"] < 19 else [])  # a power cut
    Ledger(run).event("save", step=20)
    assert main([str(run), "--audit"]) == 1
    out = capsys.readouterr().out
    assert (out.startswith("missed 0 repeated 0 lost 0 redone 0\nunproven 2 steps, from 19 to 20: ")
            and out.count("\n") == 2)


def test_nodes_with_folders_of_their_own_are_audited_together(run, tmp_path, capsys):
    other = tmp_path / "node1"
    (other / "audit").mkdir(parents=True)
    for path in (run / "audit").glob("*-rank1.jsonl"):
        path.rename(other / "audit" / path.name)
    Ledger(other).event("left", life="bb", rank=1)
    assert set(audit(run)) == {*CLEAN, "unproven"} and main([str(run), "--audit"]) == 1
    assert audit(run, other) == audit(other, run) == CLEAN
    assert capsys.readouterr() and main([str(other), str(run), "--audit"]) == 0
    assert capsys.readouterr().out == "missed 0 repeated 0 lost 0 redone 0\n"
    assert main([str(run), str(other)]) == 2
    (tmp_path / "again").symlink_to(run)
    assert main([str(run), str(other), str(tmp_path / "again"), "--audit"]) == 0, "a folder counts once"
    assert main([str(run), str(other), str(tmp_path / "none"), "--audit"]) == 2


def test_a_history_that_lacks_its_first_life_is_not_clean(run):
    path = run / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert audit(run)["unproven"] == list(range(1, 10))


def command(*arguments, cwd=HOUSE):
    return subprocess.run([sys.executable, "-m", "common.ledger", *map(str, arguments)], cwd=cwd, text=True,
                          capture_output=True, timeout=120)


def test_the_command_prints_one_line_and_exits_0_only_when_nothing_was_missed_or_repeated(run):
    clean = command(run, "--audit")
    assert (clean.stdout, clean.returncode) == ("missed 0 repeated 0 lost 0 redone 0\n", 0)
    doctor(run, "bb", 1, at(12, "begin", lambda r: [{**r, "ids": r["ids"][1:]}]))
    wrong = command(run, "--audit")
    assert (wrong.stdout, wrong.returncode) == ("missed 1 repeated 0 lost 0 redone 0\n", 1)
    assert wrong.stderr == "step 12 (epoch 1, position 32): missed 1, repeated 0\n"


def test_exit_codes(tmp_path, run, capsys):
    doctored = dict(missed=lambda r: [], repeated=lambda r: [r, r])
    for change in doctored.values():
        kept = (run / "audit" / "life-cc-rank0.jsonl").read_text()
        doctor(run, "cc", 0, at(18, "begin", change))
        assert main([str(run), "--audit"]) == 1
        (run / "audit" / "life-cc-rank0.jsonl").write_text(kept)
    live(run, "dd", world=2, resumed=15, until=22)
    assert main([str(run), "--audit"]) == 0  # five steps lost, all made again: no sample suffered
    assert capsys.readouterr().out.endswith("missed 0 repeated 0 lost 5 redone 5\n")


def test_what_cannot_be_audited_is_refused_in_words(tmp_path, capsys):
    def refused(*arguments):
        code, said = main([str(a) for a in arguments]), capsys.readouterr()
        return code == 2 and said.out == "" and said.err.startswith("error: ") and said.err.count("\n") <= 3

    assert refused(tmp_path / "nowhere", "--audit") and refused(tmp_path / "nowhere")
    (tmp_path / "ledger.jsonl").write_text("")
    assert refused(tmp_path)
    Ledger(tmp_path).event("life", life="aa", world=1, step=0)
    assert refused(tmp_path, "--audit")  # no audit folder
    Audit(tmp_path, "aa", 0).begin(1, 0, 0, [1])
    assert refused(tmp_path, "--audit")  # no step was finished
    Audit(tmp_path, "aa", 0).done(1)
    assert refused(tmp_path, "--audit")  # the life does not tell n, so that nothing can be expected of it
    Ledger(tmp_path).event("life", life="bb")
    with pytest.raises(UserError):
        summarize(tmp_path)


def test_an_audit_that_is_off_leaves_no_trace(tmp_path):
    log = Audit(tmp_path, "aa", 0, on=False)
    log.begin(1, 0, 0, [1, 2])
    log.done(1)
    assert list(tmp_path.iterdir()) == []
