"""A survivor leaves its state in memory; the next life takes it from there, verified, and saves it."""
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import PACED, audit, lives, until, wait_for
from ranks import fork_ranks
from stores import at_step, child, end, images_for, is_at, new_store, options, steps_of, tiny_state

import common.checkpoint.handover as handover
from common.checkpoint.files import Damaged
from common.checkpoint.memory import Memory, images_in, read_image, sum_of
from common.errors import UserError


@pytest.fixture
def tier(tmp_path):
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def begun(opts, tier, life="a", token="t"):
    memory = Memory(tier, opts.run_dir, token, life)
    memory.join()
    memory.sweep()
    return memory


def write(memory, opts, step, check=lambda image, facts: None):
    state = at_step(tiny_state(opts), step)
    memory.write(images_for(opts), state.tensors(), state.facts(), check)


def step_in(opts, image):
    """The step that every tensor of this image has."""
    step, folder = image
    state = tiny_state(opts)
    facts, found = read_image(step, folder, images_for(opts))
    state.load({part: twin.views for part, twin in found.items()}, facts)
    assert is_at(state, step)
    return step


def test_an_image_holds_every_tensor_and_the_newest_comes_first(tmp_path, tier):
    opts = options(tmp_path)
    memory = begun(opts, tier)
    for step in (5, 6):
        write(memory, opts, step)
    assert [step_in(opts, image) for image in images_in(memory.folder)] == [6, 5]
    assert memory.has(at_step(tiny_state(opts), 6).facts()) and memory.newest()[0] == 6
    assert not memory.has(at_step(tiny_state(opts), 7).facts())


def test_a_rank_that_has_saved_an_older_step_to_the_disk_leaves_a_peers_newer_one(tmp_path, tier):
    opts = options(tmp_path)
    side = handover.Handover("auto")
    side.memory = memory = begun(opts, tier)
    write(memory, opts, 6)
    side.end(5)
    assert [step for step, _ in images_in(memory.folder)] == [6]
    side.end(6)
    assert not memory.folder.exists()


def test_any_flipped_bit_of_an_image_is_refused(tmp_path, tier):
    opts = options(tmp_path)
    memory = begun(opts, tier)
    write(memory, opts, 5)
    image = images_in(memory.folder)[0]
    for path in image[1].iterdir():
        data = path.read_bytes()
        for bit in range(0, 8 * len(data), 61):
            path.write_bytes(data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:])
            with pytest.raises(Damaged):
                read_image(*image, images_for(opts))
        path.write_bytes(data)
    assert step_in(opts, image) == 5


def test_the_sum_sees_pages_that_changed_places_and_a_torn_end():
    buffer = torch.arange(1 << 21, dtype=torch.int32).view(torch.uint8)[:-3].clone()
    whole, swapped, torn = sum_of(buffer), buffer.clone(), buffer.clone()
    swapped[:4096], swapped[4096:8192] = buffer[4096:8192], buffer[:4096]
    torn[-5000:] = 0
    assert len({whole, sum_of(swapped), sum_of(torn)}) == 3 and sum_of(buffer.clone()) == whole


def test_a_process_that_dies_in_mid_copy_leaves_the_image_before(tmp_path, tier):
    opts = options(tmp_path)
    memory = begun(opts, tier)
    write(memory, opts, 5)

    def dies():
        write(memory, opts, 6, lambda image, facts: os.kill(os.getpid(), signal.SIGKILL))

    with child(dies) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert list(memory.staging.iterdir()), "it died too early to show anything"
    again = begun(opts, tier, life="b")
    assert [step_in(opts, image) for image in images_in(again.folder)] == [5]
    assert {path.name for path in again.folder.iterdir()} == {"users", ".life-b", "step-00000005.1"}


def test_an_older_life_can_leave_nothing_once_the_next_one_has_begun(tmp_path, tier):
    opts = options(tmp_path)
    old = begun(opts, tier)
    new = begun(opts, tier, life="b")
    with pytest.raises(OSError, match="life-a"):
        write(old, opts, 9)

    def takes_over(image, facts):  # while the older one is in its copy
        begun(opts, tier, life="c")

    with pytest.raises(OSError):
        write(new, opts, 10, takes_over)
    assert images_in(old.folder) == []


def test_the_pages_of_an_image_that_the_disk_has_are_used_again(tmp_path, tier):
    opts = options(tmp_path)
    memory = begun(opts, tier)
    memory.make_spare(images_for(opts), lambda: True)
    pages = {path.name: path.stat().st_ino for path in (memory.staging / "spare").iterdir()}
    for step in (5, 6, 7):
        write(memory, opts, step)
        _, folder = images_in(memory.folder)[0]
        assert {name: (folder / name).stat().st_ino for name in pages} == pages
        memory.free(step)
        assert images_in(memory.folder) == [] and [p.name for p in memory.staging.iterdir()] == ["spare"]


def test_what_a_dead_run_left_goes_unless_it_alone_has_the_newest_step(tmp_path, tier):
    opts, said = options(tmp_path), []
    (opts.run_dir / "checkpoints").mkdir(parents=True)
    (opts.run_dir / "lock").write_text('{"token": "t"}\n')
    other = Memory(tier, tmp_path / "other", "o", "z")

    def left(token="t"):
        def lives():
            memory = begun(opts, tier, token=token)
            write(memory, opts, 5)
            os.write(ready, b"x")
            signal.pause()
        return lives

    def sweep():
        other.sweep_others(said.append)
        return [path for path in tier.glob("elastic-*") if path != other.folder]

    for token, disk, stays in (("t", 4, True), ("t", 5, False), ("another", 4, False)):
        reader, ready = os.pipe()
        for path in (opts.run_dir / "checkpoints").iterdir():
            path.rmdir()
        (opts.run_dir / "checkpoints" / f"step-{disk:08d}").mkdir()
        with child(left(token)):
            assert os.read(reader, 1) and len(sweep()) == 1, "it is in use"
        assert len(sweep()) == stays, (token, disk)
        assert bool(said) == stays and ("alone holds step 5" in said.pop() if said else True)
    assert not list(tier.iterdir())


def test_without_room_it_says_so_once_and_a_folder_that_was_named_is_an_error(tmp_path, tier, monkeypatch):
    opts, said = options(tmp_path), []
    world = SimpleNamespace(size=2, restart=0, restarts_left=3)
    assert handover._begin(Memory(tier, opts.run_dir, "t", "a"), world, 1 << 20, said.append) == ""
    tiny = SimpleNamespace(f_bavail=64 << 8, f_frsize=4096)  # 64 MB, as containers have it
    monkeypatch.setattr(os, "statvfs", lambda path: tiny)
    why = handover._begin(Memory(tier, opts.run_dir, "new", "a"), world, 30 << 20, said.append)
    assert "67,108,864 bytes free, two images need 79,691,776" in why and not list(tier.glob("*new*"))
    monkeypatch.undo()
    monkeypatch.setattr(handover, "free_memory", lambda: 1 << 20)
    why = handover._begin(Memory(tier, opts.run_dir, "new", "a"), world, 1, said.append)
    assert "this machine's memory has" in why

    def starts(world, given):
        said = []
        store = new_store(replace(opts, memory_tier=given), replace(world, restarts_left=1), said=said)
        try:
            store.restore(tiny_state(opts))
        except UserError as error:
            return error.code, str(error)
        return said

    assert fork_ranks(2, starts, str(tier))[1][0] == 2
    monkeypatch.setattr(handover, "SHARED", tier)
    assert [len(lines) for lines in fork_ranks(2, starts, "auto")] == [1, 0]
    assert fork_ranks(2, starts, "off") == [[], []]


@pytest.mark.parametrize("harm", ["none", "a flipped bit", "the machine died"])
def test_the_next_life_takes_the_newest_state_that_verifies_and_saves_it(tmp_path, tier, harm):
    opts = options(tmp_path, memory_tier=str(tier), save_every=0)

    def dies(world):
        store, state = new_store(opts, replace(world, restarts_left=9)), tiny_state(opts)
        store.restore(state)
        if world.rank == 0:
            store.save(at_step(state, 3))
            store.wait()
        world.barrier("saved")
        at_step(state, 4)
        return store.rescue(state, in_memory=True) if world.rank else None

    def goes_on(world):
        said = []
        store, state = new_store(opts, replace(world, restarts_left=8), said=said), tiny_state(opts)
        source = store.restore(state)
        assert is_at(state, 4 if harm == "none" else 3)
        world.barrier("restored")
        store.close()
        world.barrier("closed")
        store.release()
        return source, "".join(said)

    assert fork_ranks(2, dies) == [None, True]
    assert steps_of(opts) == [3], "the survivor did not wait for the disk"
    folder = next(tier.iterdir())
    if harm == "a flipped bit":
        path = images_in(folder)[0][1] / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    elif harm == "the machine died":
        os.system(f"rm -r {folder}")
    told = fork_ranks(2, goes_on)
    assert {source for source, _ in told} == \
        {"memory/step-00000004" if harm == "none" else "checkpoints/step-00000003"}
    assert steps_of(opts) == ([4, 3] if harm == "none" else [3])
    assert ("does not have the sum of its seal; deleted" in told[0][1]) == (harm == "a flipped bit")
    assert not list(tier.iterdir()), "nothing stays in memory after the end"


def test_a_machine_without_the_image_gets_it_from_one_that_has_it(tmp_path):
    opts = [options(tmp_path / name, memory_tier=str(tmp_path / name / "memory")) for name in "ab"]
    for each in opts:
        Path(each.memory_tier).mkdir(parents=True)

    def dies(world):
        world = replace(world, restarts_left=9)
        store, state = new_store(opts[world.rank], world), tiny_state(opts[world.rank])
        store.restore(state)
        at_step(state, 4)
        return store.rescue(state, in_memory=True) if world.rank else None

    def goes_on(world):
        world = replace(world, restarts_left=8)
        store, state = new_store(opts[world.rank], world), tiny_state(opts[world.rank])
        source = store.restore(state)
        assert is_at(state, 4)
        store.close()
        world.barrier("closed")
        end(store)
        return source

    assert fork_ranks(2, dies, node_size=1) == [None, True]
    assert fork_ranks(2, goes_on, node_size=1) == ["memory/step-00000004"] * 2
    assert [steps_of(each) for each in opts] == [[4], [4]]


def test_a_killed_worker_costs_no_step_and_nothing_stays_in_memory(jobs, tmp_path, tier):
    run = tmp_path / "run"
    job = jobs.torchrun(2, "train_ddp.py", *PACED, f"--run-dir={run}", f"--memory-tier={tier}",
                        "--save-every=0")
    jobs.kill(wait_for(run, 6, job=job)["pids"][1])
    until(lambda: len(lives(run)) > 1, "the next life")
    assert job.wait(120) == 0
    assert "saved by rank 0 in memory" in job.output and "from memory/step-" in job.output
    assert lives(run)[1]["step"] >= 6 and audit(run) == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
    assert not list(tier.iterdir())


def test_off_takes_every_state_to_the_disk(jobs, tmp_path):
    run = tmp_path / "run"
    job = jobs.torchrun(2, "train_ddp.py", *PACED, f"--run-dir={run}", "--memory-tier=off", "--save-every=0")
    jobs.kill(wait_for(run, 6, job=job)["pids"][1])
    assert job.wait(120) == 0 and "in memory" not in job.output and "from checkpoints/step-" in job.output
