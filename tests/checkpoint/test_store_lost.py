"""What a run has lost is told, before more is lost: old backups, disks that flip bits, files others share."""

import os
import shutil
import threading
from types import SimpleNamespace

import pytest
from stores import (
    a_life,
    announced_rescue,
    is_at,
    options,
    resumes_at,
    save,
    started,
    steps_of,
    two_checkpoints,
    write,
)

import common.checkpoint.__main__ as command
from common.checkpoint import fence, tensors
from common.checkpoint.__main__ import main
from common.checkpoint.disk import Damaged
from common.errors import UserError
from common.extras import chosen
from common.extras.chosen import choose
from common.extras.replay import _chosen
from common.ledger import Ledger
from common.ledger.__main__ import main as report


def start(opts, then=lambda life: None):
    """What a start says of an old backup, or of a disk that is missing; its life is in the ledger."""
    with a_life(opts, said=(said := [])) as life:
        Ledger(opts.run_dir).event("life", life=life.store.world.life, world=1, step=life.state.progress.step)
        then(life)
    return [line.partition(": ")[2] for line in said if "an old backup here?" in line]


def test_a_run_that_goes_on_from_an_older_step_than_it_has_saved_says_so_once(tmp_path):
    opts = options(tmp_path)
    root = opts.run_dir / "checkpoints"

    def with_a_backup(life):
        save(life, 8)
        shutil.copytree(root, tmp_path / "backup")
        save(life, 12)

    start(opts, with_a_backup)
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "backup", root)
    said = "step {} was saved, training goes on at step {}: is a disk missing, or an old backup here?"
    assert start(opts) == [said.format(12, 8)]
    assert not start(opts)
    shutil.rmtree(root)
    assert start(opts) == [said.format(8, 0)]


def test_what_this_start_has_put_aside_is_not_told_twice(tmp_path):
    opts = options(tmp_path)
    start(opts, lambda life: (save(life, 8), save(life, 12)))
    (opts.run_dir / "checkpoints/step-00000012/model.safetensors").unlink()
    assert not start(opts)


def flip_a_bit(monkeypatch, name):
    """What a disk does to each file with this name after its sync."""
    real = tensors.write_file

    def write_file(path, *args):
        table = real(path, *args)
        if path.name == name:
            with open(path, "r+b", buffering=0) as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
        return table

    monkeypatch.setattr(tensors, "write_file", write_file)


def test_a_disk_that_flips_bits_costs_no_older_checkpoint_and_ends_the_run_with_code_4(tmp_path, monkeypatch):
    opts, root = two_checkpoints(tmp_path)
    with pytest.raises(UserError) as error, a_life(opts) as life:
        flip_a_bit(monkeypatch, "model.safetensors")
        with pytest.raises(Damaged, match="model.safetensors has sha256"):
            save(life, 3)
        write(life.store, 4)  # the last one: the clean end tries thrice
    assert error.value.code == 4
    assert steps_of(opts) == [2, 1] and not [*root.glob(".life-*")]
    monkeypatch.undo()
    assert resumes_at(opts, 2)


def test_a_new_checkpoint_is_read_back_before_an_older_one_goes_and_others_see_that_no_rank_hangs(
    tmp_path, monkeypatch
):
    opts, _ = two_checkpoints(tmp_path)
    events = []
    with a_life(opts) as life:
        writer = life.store.writer
        for name in ("commit", "read_back", "prune"):
            real = getattr(writer, name)
            monkeypatch.setattr(
                writer,
                name,
                lambda *args, name=name, real=real: [events.append((name, writer.moved)), real(*args)][1],
            )
        save(life, 3)
        thread = life.store.saver.pool.submit(threading.current_thread).result()
    names, moved = zip(*events[:3], strict=True)
    assert names == ("commit", "read_back", "prune") and moved[1] < moved[2]
    assert thread is not threading.main_thread()


def test_checkpoints_may_be_a_link_to_another_disk(tmp_path, monkeypatch):
    other = tmp_path / "other disk"
    other.mkdir()
    opts = options(tmp_path)
    opts.run_dir.mkdir()
    (opts.run_dir / "checkpoints").symlink_to(other)
    real = os.rename

    def rename(source, target):
        if str(source).startswith(str(opts.run_dir / "checkpoints")) != str(target).startswith(
            str(opts.run_dir / "checkpoints")
        ):
            raise OSError(18, "Invalid cross-device link", str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with a_life(opts) as life:
        save(life, 1)
    assert resumes_at(opts, 1) and not [*opts.run_dir.glob(".new-*")]
    assert (opts.run_dir / "options.json").is_file()


def test_resuming_does_not_change_a_backup_of_links(tmp_path):
    opts, _ = two_checkpoints(tmp_path)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        with open(opts.run_dir / name, "a") as file:
            file.write('{"event": "note", "step": 2}\n')
        os.link(opts.run_dir / name, tmp_path / name)
    backup = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "ledger.jsonl")}
    with a_life(opts) as life:
        for name in backup:
            with open(opts.run_dir / name, "a") as file:
                file.write("more\n")
        save(life, 3)
    assert {name: (tmp_path / name).read_bytes() for name in backup} == backup
    assert all((opts.run_dir / name).read_bytes().startswith(backup[name]) for name in backup)


def test_a_checkpoint_that_a_live_run_deletes_meanwhile_is_not_called_damaged(tmp_path, monkeypatch, capsys):
    opts, root = two_checkpoints(tmp_path)
    real = chosen.describe

    def describe(step, folder):
        if step == 2:
            shutil.rmtree(folder)
        return real(step, folder)

    for module in (chosen, command):
        monkeypatch.setattr(module, "describe", describe)
    shutil.copytree(root, tmp_path / "both")
    assert choose(opts.run_dir, "newest")[0] == 1
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "both", root)
    assert main([str(opts.run_dir)]) == 0
    out, err = capsys.readouterr()
    assert out.count("whole") == 1 and "damaged" not in out + err


@pytest.mark.parametrize("size", [6, 24])
def test_at_most_four_survivors_wait_for_a_rescue_however_many_there_are(tmp_path, monkeypatch, size):
    """The others leave at once; those that are a step further wait on their own account."""
    path = tmp_path / "rescue.lock"
    waiting = []
    go_on = threading.Event()
    monkeypatch.setattr(fence, "wait_for", lambda *args, **more: (waiting.append(1), go_on.wait(60)))
    saved = threading.Event()
    asked = []

    def survive(state):
        with fence.rescuing(path, lambda: 0, saved.is_set, lambda: state) as is_asked:
            asked.append(is_asked)

    with fence.rescuing(path, lambda: 0, lambda: False, lambda: "7"):
        ranks = [threading.Thread(target=survive, args=(state,)) for state in ["7"] * size + ["8"] * size]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(0.0 if len(waiting) >= 8 else 60.0 / len(ranks))
        while len(asked) < 2 * size - 8:
            go_on.wait(0.01)
        assert len(waiting) == 8 and asked == [False] * (2 * size - 8)
        saved.set()
        go_on.set()
        for rank in ranks:
            rank.join()
    assert asked.count(True) == 8


def test_a_survivor_that_need_not_wait_saves_nothing_and_says_nothing(tmp_path):
    opts = options(tmp_path)
    store, state = started(opts)
    try:
        held = fence.Lock(store.writer.staging / fence.RESCUE)
        for k in range(fence.MOST_WAITING):
            (store.writer.staging / f"{fence.WAITING}5-0--1.{k}").touch()
        assert announced_rescue(store, 5) == "" and steps_of(opts) == []
        held.close()
        for path in store.writer.staging.glob(f"{fence.WAITING}*"):
            path.unlink()
        assert announced_rescue(store, 5) == "step 5 saved by rank 0" and is_at(state, 5)
    finally:
        store.saver.pool.shutdown()
        store.fence.release()


def test_what_a_run_began_with_is_known_whatever_its_newest_start_says(tmp_path, capsys):
    other, _ = two_checkpoints(tmp_path / "other")
    for resume, step in ((str(other.run_dir), 3), ("auto", 4)):
        with a_life(options(tmp_path, resume=resume)) as life:
            save(life, step)
    for opts, proven in ((options(tmp_path), False), (other, True)):
        steps = _chosen(SimpleNamespace(run=opts.run_dir, first=0, last=9, all=True))
        assert (steps[0][0] == 0) is proven
        assert ("nothing proves step 3, where it begins" in capsys.readouterr().out) is not proven


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path, capsys):
    Ledger(tmp_path).event(
        "life", life="\x1b]0;title\x07", world=1, step=0, began=0.0, pids=[1], hosts=["\x9b31m"]
    )
    assert report([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\\x1b]0;title\\x07" in out and not {*out} & {"\x1b", "\x07", "\x9b"}
