"""What a run has lost is told, before more is lost: old backups, disks that flip bits, files others share."""

import os
import shutil
from types import SimpleNamespace

import pytest
from refusals import refusal
from stores import (
    a_life,
    announced_rescue,
    end,
    is_at,
    options,
    save,
    started,
    steps_of,
    two_checkpoints,
    write,
)

from common.checkpoint import fence, tensors
from common.checkpoint.disk import Damaged
from common.extras import chosen
from common.extras import exports as command
from common.extras.chosen import choose
from common.extras.exports import main
from common.extras.replay import _chosen
from common.extras.report import main as report
from common.ledger import Ledger


def start(opts, *steps):
    """What a life that saves these steps says of an old backup, or of a disk that is missing."""
    with a_life(opts) as life:
        Ledger(opts.run_dir).event("life", life=life.store.world.life, world=1, step=life.state.progress.step)
        for step in steps:
            save(life, step)
    return [line for line in life.said if "an old backup here?" in line]


def test_a_run_that_goes_on_from_an_older_step_than_it_has_saved_says_so_once(opts):
    root = opts.run_dir / "checkpoints"
    start(opts, 8, 12)
    (root / "step-00000012/model.safetensors").unlink()
    assert not start(opts), "it is put aside, and told so"
    shutil.rmtree(root / "damaged-step-00000012")
    for lost, step in ((root / "step-00000012", 8), (root, 0)):
        start(opts, 12)
        shutil.rmtree(lost)
        (said,) = start(opts)
        assert f"step 12 was saved, training goes on at step {step}: is a disk missing" in said
        assert not start(opts)


def test_a_disk_that_flips_bits_costs_no_older_checkpoint_and_ends_the_run_with_code_4(tmp_path, monkeypatch):
    opts, root = two_checkpoints(tmp_path)
    real = tensors.write_file

    def write_file(path, *args):
        table = real(path, *args)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return table

    with refusal(code=4), a_life(opts) as life:
        monkeypatch.setattr(tensors, "write_file", write_file)
        with pytest.raises(Damaged, match="has sha256"):
            save(life, 3)
        write(life.store, 4)  # the last one: the clean end tries thrice
    assert steps_of(opts) == [2, 1] and not [*root.glob(".life-*")]
    monkeypatch.undo()
    with a_life(opts) as life:
        assert is_at(life.state, 2)
        before = life.store.writer.moved
        life.store.writer.read_back(2, root / "step-00000002")
        assert life.store.writer.moved > before, "others see that no rank hangs"


def test_resuming_does_not_change_a_backup_of_links(tmp_path):
    opts, _ = two_checkpoints(tmp_path)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        file = opts.run_dir / name
        file.write_text("before\n")
        os.link(file, tmp_path / name)
        with a_life(opts), file.open("a") as log:
            log.write("more\n")
        assert file.read_text() == "before\nmore\n" and (tmp_path / name).read_text() == "before\n"


def test_a_checkpoint_that_a_live_run_deletes_meanwhile_is_not_called_damaged(tmp_path, monkeypatch, capsys):
    real = chosen.describe

    def describe(step, folder):
        if step == 2:
            shutil.rmtree(folder)
        return real(step, folder)

    for module in (chosen, command):
        monkeypatch.setattr(module, "describe", describe)
    opts, _ = two_checkpoints(tmp_path / "one")
    assert choose(opts.run_dir, "newest")[0] == 1
    opts, _ = two_checkpoints(tmp_path / "other")
    assert main([str(opts.run_dir)]) == 0
    out, err = capsys.readouterr()
    assert out.count("whole") == 1 and "damaged" not in out + err


def test_at_most_four_survivors_wait_with_one_state_and_the_others_save_and_say_nothing(opts):
    """Those that are a step further wait on their own account."""
    store, state = started(opts)
    path = store.writer.staging / fence.RESCUE
    try:
        held = fence.Lock(path)
        assert [fence.may_wait(path, "5-0--1") for _ in range(5)] == [True] * 4 + [False]
        assert fence.may_wait(path, "6-0--1")
        assert announced_rescue(store, 5) == ""
        held.close()
        assert announced_rescue(store, 6) == "step 6 saved by rank 0" and is_at(state, 6)
    finally:
        end(store)


def test_what_a_run_began_with_is_known_whatever_its_newest_start_says(tmp_path, capsys):
    other, _ = two_checkpoints(tmp_path / "other")
    for resume, step in ((str(other.run_dir), 3), ("auto", 4)):
        opts = options(tmp_path, resume=resume)
        with a_life(opts) as life:
            save(life, step)
    for run, first in ((opts.run_dir, 3), (other.run_dir, 0)):
        steps = _chosen(SimpleNamespace(run=run, first=0, last=9, all=True))
        assert steps[0][0] == first
        assert ("nothing proves step 3, where it begins" in capsys.readouterr().out) == (first == 3)


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path, capsys):
    Ledger(tmp_path).event(
        "life", life="\x1b]0;title\x07", world=1, step=0, began=0.0, pids=[1], hosts=["\x9b31m"]
    )
    assert report([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\\x1b]0;title\\x07" in out and not {*out} & {"\x1b", "\x07", "\x9b"}
