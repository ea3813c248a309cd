"""A survivor leaves its state in memory; the next life takes it from there, verified, and saves it."""
import errno
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jobs import PACED, ROOT, TESTS, audit, events, lives, until, wait_for
from ranks import fork_ranks
from stores import (
    announced_rescue,
    at_step,
    child,
    end,
    images_for,
    is_at,
    load,
    new_store,
    options,
    steps_of,
    tiny_state,
)
from torch import nn

from common.checkpoint import memory as room
from common.checkpoint.fence import Fenced
from common.checkpoint.manifest import checkpoints
from common.checkpoint.memory import Memory
from common.checkpoint.tensor_file import Live, TensorFile
from common.errors import UserError

PAIR = SimpleNamespace(size=2, restart=0, restarts_left=3)  # a world


@pytest.fixture
def tier(tmp_path):
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def made(opts, tier, life="a", token="t"):
    return Memory(tier, opts.run_dir, token, new_store(opts).writer.marks | {"life": life})


def begun(opts, tier, life="a", token="t"):
    memory = made(opts, tier, life, token)
    assert memory.begin(1 << 10, PAIR, print) == ""
    return memory


def write(memory, opts, step):
    state = at_step(tiny_state(opts), step)
    images = images_for(opts)
    memory.writer.commit({part: Live(images[part], tensors) for part, tensors in state.tensors().items()},
                         state.facts())


def test_what_a_survivor_leaves_is_a_checkpoint_and_the_newest_comes_first(tmp_path, tier):
    opts = options(tmp_path)
    memory = begun(opts, tier)
    for step in (5, 6):
        write(memory, opts, step)
        assert load(memory.root, images_for(opts)) == (step, True)
    memory.free(5)
    assert [step for step, _ in memory.checkpoints()] == [6]


def test_a_rank_that_has_saved_an_older_step_to_the_disk_leaves_a_peers_newer_one(tmp_path, tier):
    opts = options(tmp_path)
    memory = begun(opts, tier)
    write(memory, opts, 6)
    memory.end(5)
    assert [step for step, _ in memory.checkpoints()] == [6]
    memory.end(6)
    assert not list(tier.iterdir())


def test_what_lies_in_one_tensor_is_written_without_a_copy(tmp_path):
    tensors = {"a": torch.arange(64.0), "b": torch.arange(64.0)}
    live = Live(TensorFile(tensors), tensors)
    for start, (name, at) in {live.starts[0]: ("a", 0), live.starts[1] + 4: ("b", 4)}.items():
        found = np.frombuffer(live[start:start + 96], np.uint8)
        assert found.ctypes.data == tensors[name].data_ptr() + at
    image = TensorFile(tensors)
    image.copy(tensors)
    for start in range(0, len(live), 40):
        assert live[start:start + 40] == image.bytes[start:start + 40]


OWN_BYTES = 8 << 20  # of a rank, whatever the state weighs: blocks, threads, pages of libraries
LAYERS = int(os.environ.get("RESTORE_LAYERS", "8"))  # of 12.6 MB each


def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))


@pytest.mark.parametrize("where", ["the disk", "memory"])
def test_eight_ranks_of_a_machine_restore_with_one_state_beside_their_own(tmp_path, tier, where):
    opts = options(tmp_path, optimizer="adamw", memory_tier=str(tier), save_every=0)

    def begun(world):
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(LAYERS)))
        state = tiny_state(opts, net)
        for tensor in state.tensors()["optimizer"].values():
            tensor.fill_(1)  # all pages are there
        return new_store(opts, replace(world, restarts_left=9)), state

    def dies(world):
        store, state = begun(world)
        store.restore(state)
        state.step = 4
        return world.rank and announced_rescue(store, state, in_memory=where == "memory")

    def restores(world):
        store, state = begun(world)
        size = {part: sum(t.nbytes for t in named.values()) for part, named in state.tensors().items()}
        with open("/proc/self/clear_refs", "w") as file:  # the peak from here on
            file.write("5")
        before = status("VmRSS")
        assert store.restore(state) and state.step == 4
        world.barrier("restored")
        peak = status("VmHWM") - before
        store.unsaved = False
        end(store)
        return peak, size

    assert fork_ranks(2, dies) == [0, where.removeprefix("the ")]
    peaks, (size, *_) = zip(*fork_ranks(8, restores), strict=True)
    # each rank maps a file of memory as it reads it, and all map the same one
    state, shared = sum(size.values()), max(size.values()) if where == "memory" else 0
    beside = sum(max(0, peak - shared - OWN_BYTES) for peak in peaks) + (state if shared else 0)
    print(f"{where}: {beside / state:.2f} x one state of {state >> 20} MiB; MiB of each rank: "
          f"{[peak - shared >> 20 for peak in peaks]}")
    assert beside <= 1.2 * state, (peaks, size)


def test_any_flipped_bit_in_memory_is_refused(tmp_path, tier):
    opts, images = options(tmp_path), images_for(options(tmp_path))
    memory = begun(opts, tier)
    write(memory, opts, 5)
    for path in memory.checkpoints()[0][1].iterdir():
        data = path.read_bytes()
        for bit in range(0, 8 * len(data), 61):
            path.write_bytes(data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:])
            assert load(memory.root, images) == (-1, False)
        path.write_bytes(data)
    assert load(memory.root, images) == (5, True)


def test_a_process_that_dies_in_mid_copy_leaves_the_checkpoint_before(tmp_path, tier):
    opts = options(tmp_path)
    memory = begun(opts, tier)
    write(memory, opts, 5)

    def dies():
        memory.writer._write_manifest = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        write(memory, opts, 6)

    with child(dies) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert list(memory.staging.iterdir()), "it died too early to show anything"
    again = begun(opts, tier, life="b")
    assert [step for step, _ in again.checkpoints()] == [5]
    assert {path.name for path in again.root.iterdir()} == {"users", ".life-b", "step-00000005"}


def test_an_older_life_can_leave_nothing_once_the_next_one_has_begun(tmp_path, tier):
    opts = options(tmp_path)
    old, new = begun(opts, tier), begun(opts, tier, life="b")
    with pytest.raises(Fenced):
        write(old, opts, 9)
    named, writer = new.writer._name, new.writer

    def takes_over(*args):  # while the older one is in its copy
        begun(opts, tier, life="c")
        return named(*args)

    writer._name = takes_over
    with pytest.raises(Fenced):
        write(new, opts, 10)
    assert new.checkpoints() == []


def test_what_a_dead_run_left_goes_unless_it_alone_has_the_newest_step(tmp_path, tier):
    opts, said = options(tmp_path), []
    (opts.run_dir / "checkpoints").mkdir(parents=True)
    (opts.run_dir / "lock").write_text('{"token": "t"}\n')
    other = made(options(tmp_path / "other"), tier, "z", "o")

    def left(token="t"):
        def lives():
            memory = begun(opts, tier, token=token)
            write(memory, opts, 5)
            os.write(ready, b"x")
            signal.pause()
        return lives

    def sweep():
        other._sweep_others(said.append)
        return list(tier.glob("elastic-*"))

    for token, disk, stays in (("t", 4, True), ("t", 5, False), ("another", 4, False)):
        reader, ready = os.pipe()
        for path in (opts.run_dir / "checkpoints").iterdir():
            path.rmdir()
        (opts.run_dir / "checkpoints" / f"step-{disk:08d}").mkdir()
        with child(left(token)):
            assert os.read(reader, 1) and len(sweep()) == 1, "it is in use"
        assert len(sweep()) == stays and not said, (token, disk, "its next life may be about to take it")
        for folder in tier.glob("elastic-*"):
            os.utime(folder, (0, time.time() - 601))
        assert len(sweep()) == stays
        assert bool(said) == stays and ("alone holds step 5" in said.pop() if said else True)
        assert len(sweep()) == stays and not said, "later starts say nothing"
    assert not list(tier.iterdir())


def test_a_run_whose_disk_does_not_answer_keeps_its_memory_and_hinders_no_other(tmp_path, tier, monkeypatch):
    opts = options(tmp_path)
    with child(lambda: write(begun(opts, tier), opts, 5)) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def asks(root):
        if root == opts.run_dir / "checkpoints":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(root))
        return checkpoints(root)

    monkeypatch.setattr(room, "checkpoints", asks)
    other = begun(options(tmp_path / "other"), tier)
    assert other.used and len(list(tier.glob("*/step-00000005"))) == 1
    monkeypatch.undo()
    other._sweep_others(print)
    assert list(tier.iterdir()) == [other.root]


def test_without_room_it_says_so_once_and_a_folder_that_was_named_is_an_error(tmp_path, tier, monkeypatch):
    opts, said = options(tmp_path), []
    tiny = SimpleNamespace(f_bavail=64 << 8, f_frsize=4096)  # 64 MB, as containers have it
    monkeypatch.setattr(os, "statvfs", lambda path: tiny)
    why = made(opts, tier).begin(30 << 20, PAIR, said.append)
    assert "67,108,864 bytes free, two checkpoints need 79,691,776" in why and not list(tier.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(room, "free_memory", lambda: 1 << 20)
    assert "this machine's memory has" in made(opts, tier).begin(1, PAIR, said.append)

    def starts(world, given):
        said = []
        store = new_store(replace(opts, memory_tier=given), replace(world, restarts_left=1), said=said)
        try:
            store.restore(tiny_state(opts))
        except UserError as error:
            return error.code, str(error)
        return said

    assert fork_ranks(2, starts, str(tier))[1][0] == 2
    monkeypatch.setattr(room, "SHARED", tier)
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
        return announced_rescue(store, state, in_memory=True) if world.rank else None

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

    assert fork_ranks(2, dies) == [None, "memory"]
    assert steps_of(opts) == [3], "the survivor did not wait for the disk"
    folder = next(tier.iterdir())
    if harm == "a flipped bit":
        path = checkpoints(folder)[0][1] / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    elif harm == "the machine died":
        os.system(f"rm -r {folder}")
    told = fork_ranks(2, goes_on)
    assert {source for source, _ in told} == \
        {"memory/step-00000004" if harm == "none" else "checkpoints/step-00000003"}
    assert steps_of(opts) == ([4, 3] if harm == "none" else [3])
    assert ("model.safetensors has sums" in told[0][1]) == (harm == "a flipped bit")
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
        return announced_rescue(store, state, in_memory=True) if world.rank else None

    def goes_on(world):
        world = replace(world, restarts_left=8)
        store, state = new_store(opts[world.rank], world), tiny_state(opts[world.rank])
        source = store.restore(state)
        assert is_at(state, 4)
        store.close()
        world.barrier("closed")
        end(store)
        return source

    assert fork_ranks(2, dies, node_size=1) == [None, "memory"]
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


NEVER = """
import os
import signal
import sys
sys.path.insert(0, {tools!r})
from paced import net as made
def net(opts, data):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        print("the next life hangs", flush=True)
        signal.pause()
    return made(opts, data)
"""


@pytest.mark.parametrize("moment", ["at once", "while the next life starts", "onto a disk that refuses it"])
def test_a_job_that_is_stopped_as_a_worker_dies_leaves_nothing_in_memory_alone(jobs, tmp_path, tier, moment):
    run, own = tmp_path / "run", tmp_path / "own.py"
    own.write_text(NEVER.format(tools=str(TESTS)))
    job = jobs.start(ROOT / "launch/torchrun.py", "--nproc_per_node=2", ROOT / "train_ddp.py", *PACED,
                     f"--model={own}:net", f"--run-dir={run}", f"--memory-tier={tier}", "--save-every=0",
                     "--save-seconds=0", PACE="0.02")
    jobs.kill(wait_for(run, 6, job=job)["pids"][1])
    if moment != "at once":
        until(lambda: "the next life hangs" in job.output, "the next life")
        assert not list(run.glob("checkpoints/step-*")) and len(list(tier.glob("*/step-*"))) == 1
    if refused := "refuses" in moment:
        (run / "checkpoints").rename(run / "elsewhere")
        (run / "checkpoints").touch()
    job.kill(signal.SIGTERM)
    assert job.wait() == (4 if refused else 143), job.output
    step = max(event["step"] for event in events(run, "rescue"))
    assert len(list(run.glob(f"checkpoints/step-{step:08d}"))) == (not refused), job.output
    assert len(list(tier.iterdir())) == refused
    assert ("in this machine's memory alone" in job.output) == refused


def test_off_takes_every_state_to_the_disk(jobs, tmp_path):
    run = tmp_path / "run"
    job = jobs.torchrun(2, "train_ddp.py", *PACED, f"--run-dir={run}", "--memory-tier=off", "--save-every=0")
    jobs.kill(wait_for(run, 6, job=job)["pids"][1])
    assert job.wait(120) == 0 and "in memory" not in job.output and "from checkpoints/step-" in job.output
