"""A checkpoint of which each rank writes and reads what it owns: a wrong byte is found, wherever on its way
it became wrong.
"""
import os
import time
from datetime import timedelta

import pytest
import torch
from ranks import fork_ranks
from stores import a_life, at_step, end, is_at, options, save, steps_of
from torch import nn

from common.checkpoint import manifest, open_store, pieces
from common.checkpoint.manifest import folder_name, verify
from common.checkpoint.parts import PartsStore
from common.errors import UserError
from common.training import TrainState, build_optimizer
from common.world import rendezvous as meeting

STAGES = 2


def whole_net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 2 + i) for i in range(STAGES)))


def store_of(world, folder, said):
    """(store, state) of this rank's stage."""
    world, opts = world.in_stages(STAGES), options(folder, script="mp", stages=STAGES)
    net = nn.Sequential(*(layer if i == world.stage else nn.Identity() for i,
                          layer in enumerate(whole_net())))
    state = TrainState(net, build_optimizer(net, opts), opts, samples=640)
    return open_store(opts, world, "f" * 64, report=said.append), state


def flip(path, at):
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 64]), at)


def saved(store, state, step):
    store.save(at_step(state, step))
    store.wait()
    store.world.barrier(f"saved {step}")
    error, store.error = store.error, None
    return str(error or "")


def close(store):
    store.world.barrier("close")
    end(store)


def test_a_bit_that_flips_in_a_part_before_it_is_joined_is_found_and_the_next_save_is_whole(tmp_path):
    def live(world):
        store, state = store_of(world, tmp_path, [])
        store.restore(state)
        real, flipped = pieces.Joined._part, []

        def flips(self, place):
            # a disk or a cache between the commit and the join
            if not flipped and self.file == "model.safetensors":
                flipped.append(place)
                flip(place / self.file, -1 % os.path.getsize(place / self.file))
            return real(self, place)
        pieces.Joined._part = flips
        errors = saved(store, state, 1)
        pieces.Joined._part = real
        errors += saved(store, state, 2)
        close(store)
        return errors

    errors = "".join(fork_ranks(STAGES, live))
    assert "model.safetensors has SHA-256" in errors and errors.count("SHA-256") == 1
    opts = options(tmp_path, script="mp")
    assert steps_of(opts) == [2] and verify(2, opts.run_dir / "checkpoints" / folder_name(2))
    with a_life(opts, whole_net()) as life:
        assert is_at(life.state, 2)


@pytest.mark.parametrize("piece", [8, pieces.PIECE])
@pytest.mark.parametrize("how", ["flipped", "a link", "not at all"])
def test_what_a_rank_reads_is_what_rank_0_has_verified(tmp_path, monkeypatch, how, piece):
    monkeypatch.setattr(pieces, "PIECE", piece)
    opts = options(tmp_path, script="mp")
    with a_life(opts, whole_net()) as life:
        save(life, 1), save(life, 2)
    file = opts.run_dir / "checkpoints" / folder_name(2) / "model.safetensors"

    def live(world):
        store, state = store_of(world, tmp_path, said := [])
        real = PartsStore._take

        def late(self, *args):
            if world.rank and how == "flipped":  # after rank 0 has verified it
                at = len(self.whole["model"].header) + self.whole["model"].places["1.weight"][0]
                flip(file, at + 4 * 3 * 2 + 1)  # in the last row
            elif world.rank and how == "a link":
                os.rename(file, tmp_path / "elsewhere")
                file.symlink_to(tmp_path / "elsewhere")
            if how == "a link":
                world.barrier("linked")
            real(self, *args)
        PartsStore._take = late
        try:
            store.restore(state)
            return is_at(state, 2), said
        except UserError as error:
            return error.code, "does not read" in str(error) and ("step-00000002 as rank 0 did: "
                                                                  "model.safetensors") in str(error)
        finally:
            close(store)

    expected = (True, []) if how == "not at all" else (1, True)
    assert fork_ranks(STAGES, live) == [expected] * 2


def test_a_damaged_whole_is_not_taken_apart_but_the_one_before(tmp_path):
    opts = options(tmp_path, script="mp")
    with a_life(opts, whole_net()) as life:
        save(life, 1), save(life, 2)
    flip(opts.run_dir / "checkpoints" / folder_name(2) / "optimizer.safetensors", 1000)

    def live(world):
        store, state = store_of(world, tmp_path, said := [])
        store.restore(state)
        close(store)
        return is_at(state, 1), any("optimizer.safetensors has SHA-256" in text for text in said)

    assert fork_ranks(STAGES, live) == [(True, True), (True, False)]


@pytest.mark.parametrize("piece", [8, 16, 24, 1 << 24])
def test_rows_of_a_tensor_are_read_out_of_pieces_of_any_size(tmp_path, monkeypatch, piece):
    """What --shard does: a rank owns some rows, and compares whole pieces."""
    monkeypatch.setattr(pieces, "PIECE", piece)
    tensors = {"a": torch.arange(14, dtype=torch.float64).view(7, 2), "b": torch.arange(5, dtype=torch.int16),
               "none": torch.empty(0, 3)}
    whole = pieces.TensorFile(tensors).open()
    whole.copy(tensors)
    path = tmp_path / "file"
    path.write_bytes(whole.bytes)
    digests = pieces.Digests(whole)
    for at in range(0, whole.size, 10):
        digests(at, whole.bytes[at:at + 10])
    assert digests.fits()
    for start in range(7):
        for rows in range(8 - start):
            own = {name: t[start:start + rows] if name == "a" else t for name, t in tensors.items()}
            with open(path, "rb") as file:
                slices = pieces.Slices(file.fileno(), "file", whole, pieces.TensorFile(own),
                                       {"a": start * 16, "b": 0, "none": 0},
                                       bytes(digests.found), lambda: None)
                assert all(torch.equal(slices[name], t) for name, t in own.items())
    flip(path, whole.size - 1)
    with open(path, "rb") as file, pytest.raises(pieces.Damaged, match="b is not what rank 0 has verified"):
        pieces.Slices(file.fileno(), "file", whole, whole, dict.fromkeys(tensors, 0), bytes(digests.found),
                      lambda: None)["b"]


def test_ranks_wait_for_a_reader_as_long_as_it_moves_and_no_longer(tmp_path):
    """JOINING is ten minutes: what takes longer to verify could never be resumed from."""
    opts = options(tmp_path)
    with a_life(opts) as life:
        save(life, 1)

    def live(world):
        meeting.JOINING = timedelta(seconds=0.3)
        real = manifest.read_file

        def slow(path, entry, use, wanted, from_disk, moved, count):
            for _ in range(12 if path.name.startswith("model") else 0):
                time.sleep(0.1)
                moved()
            return real(path, entry, use, wanted, from_disk, moved, count)
        manifest.read_file = slow
        with a_life(opts, world=world) as life:
            assert is_at(life.state, 1)
        if world.rank:
            with pytest.raises(RuntimeError):
                meeting.wait(world.store, "what nobody brings")
        meeting.JOINING = timedelta(seconds=30)
        world.barrier("waited")

    fork_ranks(2, live)
