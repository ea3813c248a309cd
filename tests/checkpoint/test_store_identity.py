"""A run is its options and its data: what contradicts them is refused with both values."""
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import fork_ranks
from stores import (
    a_life,
    child,
    end,
    is_at,
    new_store,
    options,
    refused,
    save,
    steps_of,
    tiny_net,
    tiny_state,
    two_checkpoints,
)

import train_ddp
from common.checkpoint import identity, owner
from common.checkpoint.__main__ import main
from common.checkpoint.files import sealed
from common.options import Options
from common.options.flags import PATH, fixed, whole
from common.world import fingerprint_of

OLD_DATA = json.loads(Path(__file__).with_name("old_run").joinpath("options.json").read_text())["data"]


def test_contradicting_options_and_changed_data_are_refused_with_both_values(tmp_path):
    two_checkpoints(tmp_path)
    text = refused(options(tmp_path, seed=4, lr=0.5), "--seed was 0, now 4")
    assert "--lr was 0.001, now 0.5" in text
    refused(options(tmp_path), "the data's fingerprint was ffffffffffff, now 000000000000",
            fingerprint="0" * 64)


def test_what_does_not_decide_the_result_may_change(tmp_path):
    two_checkpoints(tmp_path)
    with a_life(options(tmp_path, epochs=9, max_steps=7, save_every=3, keep=5, log_every=1,
                        data_dir="elsewhere")) as life:
        assert is_at(life.state, 2)


def test_another_torch_is_said_and_not_refused(tmp_path):
    opts, _ = two_checkpoints(tmp_path)
    path, said = opts.run_dir / "options.json", []
    old = json.loads(path.read_text())
    old.pop("seal")
    path.write_bytes(sealed(old | {"torch": "1.13"}))
    with a_life(opts, said=said) as life:
        assert is_at(life.state, 2)
    assert f"was begun with torch 1.13, this is {torch.__version__}" in said[0]


def test_the_way_to_a_users_file_does_not_count_and_new_code_in_it_is_said_once(tmp_path, monkeypatch):
    own = tmp_path / "sub/own.py"
    own.parent.mkdir()
    own.write_text("one = 1")

    def begin(spelled):
        said = []
        with a_life(options(tmp_path, model=f"{spelled}:net"), said=said) as life:
            save(life, 2)
        return said

    monkeypatch.chdir(tmp_path)
    assert begin("sub/own.py") == [] == begin(own)
    monkeypatch.chdir(own.parent)
    assert begin("own.py") == [] == begin("./own.py")
    own.write_text("one = 2")
    assert begin(own) == [f"{own}: changed since this run was started last; it resumes with the new code"]
    assert begin(own) == []
    (own.parent / "other.py").write_text("one = 2")
    refused(options(tmp_path, model="other.py:net"), "--model was '.*own.py:net', now 'other.py:net'")
    path = tmp_path / "run/options.json"
    before = json.loads(path.read_text())
    del before["seal"], before["own_code"]
    path.write_bytes(sealed(before))  # a run of an earlier version
    assert begin("own.py") == [] and "own_code" in json.loads(path.read_text())


def test_no_flipped_bit_of_the_options_passes_for_another_value(tmp_path):
    """The checkpoints know whose run it is; options.json is written anew."""
    opts, _ = two_checkpoints(tmp_path)
    path = opts.run_dir / "options.json"
    data = path.read_bytes()
    for bit in range(0, len(data) * 8, 331):
        path.write_bytes(data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:])
        with a_life(opts) as life:
            assert is_at(life.state, 2), bit
        assert path.read_bytes() == data
    for content in (b"", data[:50], b"\0" * len(data)):
        path.write_bytes(content)
        refused(options(tmp_path, seed=1), "another run: --seed was 0, now 1")
        with a_life(opts) as life:
            assert is_at(life.state, 2)
    path.unlink()
    refused(options(tmp_path, seed=1), "another run: --seed was 0, now 1")
    path.mkdir()
    refused(opts, "is not a regular file")


def test_a_run_torn_at_its_birth_begins_again(tmp_path):
    opts = options(tmp_path)
    with a_life(opts):
        pass
    os.truncate(opts.run_dir / "options.json", 10)
    with a_life(options(tmp_path, seed=2)) as life:
        assert life.source is None
        save(life, 1)
    refused(opts, "--seed was 2, now 0")


def test_a_folder_in_which_nothing_was_saved_is_bound_to_nothing(tmp_path):
    opts, said = options(tmp_path), []
    with a_life(opts):
        pass
    with a_life(options(tmp_path, seed=2), said=said, fingerprint="0" * 64) as life:
        told = "nothing was saved here yet, so the options may change: --seed was 0, now 2; the data's"
        assert told in said[0]
        save(life, 1)
    refused(opts, "--seed was 2, now 0")
    os.rename(opts.run_dir / "checkpoints/step-00000001", opts.run_dir / "checkpoints/damaged-step-00000001")
    refused(opts, "--seed was 2, now 0")  # what is put aside was saved all the same


def test_a_checkpoint_of_another_run_is_no_damage_and_is_named_with_each_field(tmp_path):
    opts, root = two_checkpoints(tmp_path, steps=(1,))
    _, others = two_checkpoints(tmp_path / "other", steps=(9,), seed=3, lr=0.5)
    shutil.copytree(others / "step-00000009", root / "step-00000009")
    text = refused(opts, "step-00000009 is of another run: --seed was 3, now 0; --lr was 0.5, now 0.001")
    assert "move it away" in text and sorted(os.listdir(root)) == ["step-00000001", "step-00000009"]
    shutil.rmtree(root / "step-00000009")
    with a_life(opts) as life:
        assert is_at(life.state, 1)


# ---- runs that other versions have begun ----------------------------------------------------------
@dataclass(frozen=True)
class Later(Options):
    """Flags of a version that is still to come."""

    new_flag: int = fixed(0, whole(0), "decides, and was not there when the run began")
    new_names: tuple = fixed((), PATH, "of a kind that JSON gives back as another")


OLD_RUN = dict(script="ddp", model="mlp", dataset="random", epochs=2, global_batch_size=20, log_every=1,
               tensorboard=False, progress="off", device="cpu", save_seconds=0)


def train(run_dir, kind=Options, **flags):
    """(the last step, the run's training loss at each step), in a process of its own."""
    opts = kind(**OLD_RUN | flags, run_dir=run_dir)

    def live(world):
        train_ddp.join = lambda opts: world
        train_ddp.main.__wrapped__.__wrapped__(opts)

    fork_ranks(1, live)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return steps_of(opts)[0], [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def old_run(tmp_path):
    """A copy of what `train_ddp.py` of the first version with a README has left at step 3 of 10."""
    shutil.copytree(Path(__file__).with_name("old_run"), tmp_path / "run")
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return tmp_path / "run"


@pytest.mark.parametrize("kind", [Options, Later])
@pytest.mark.parametrize("lost", ["nothing", "options.json"])
def test_a_run_of_an_old_version_goes_on_and_a_flag_that_came_later_has_its_default_there(old_run, tmp_path,
                                                                                          kind, lost):
    assert main([str(old_run)]) == 0
    if lost == "options.json":
        (old_run / lost).unlink()
    step, losses = train(old_run, kind)
    assert step == 10 and train(tmp_path / "whole", kind) == (10, losses)
    assert main([str(old_run)]) == 0
    assert train(old_run, Later, epochs=3)[0] == 15  # old and new checkpoints side by side


def test_a_flag_that_came_later_may_not_be_changed_on_the_way(old_run):
    for flags, words in (({"new_flag": 5}, "--new-flag was 0, now 5"),
                         ({"new_names": ("a",)}, r"--new-names was \[\], now \['a'\]")):
        refused(Later(**OLD_RUN | flags, run_dir=old_run), words, fingerprint=OLD_DATA)
    refused(Later(**OLD_RUN | {"seed": 1}, run_dir=old_run), "--seed was 0, now 1", fingerprint=OLD_DATA)
    (old_run / "options.json").unlink()
    refused(Later(**OLD_RUN, run_dir=old_run), "the data's fingerprint was 0e3debf5db05, now ffff")


def test_starting_afresh_keeps_what_was_there_and_a_restart_of_the_same_job_goes_on(tmp_path, monkeypatch):
    opts, _ = two_checkpoints(tmp_path)
    for name in ("metrics.jsonl", "log-to.json"):  # a tracker gets the new run from step 1
        (opts.run_dir / name).write_text("{}\n")
    afresh, said = options(tmp_path, resume="none", seed=3), []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    with a_life(afresh, said=said) as life:
        assert life.source is None and "before-1" in said[0]
        assert {"metrics.jsonl", "log-to.json"} <= {p.name for p in (opts.run_dir / "before-1").iterdir()}
        save(life, 5)
    with a_life(afresh, said=said) as life:  # the agent restarts its workers with the same words
        assert is_at(life.state, 5) and "restart of the same job" in said[1]
    monkeypatch.setattr(owner, "agent_id", lambda: 12345)  # the same run id, started anew by its user
    with a_life(afresh) as life:
        assert life.source is None and steps_of(opts) == []
    assert (opts.run_dir / "before-2" / "checkpoints" / "step-00000005").exists()


def test_a_job_that_slurm_queues_again_is_still_the_same_job(tmp_path, monkeypatch):
    opts, _ = two_checkpoints(tmp_path)
    afresh = options(tmp_path, resume="none")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with a_life(afresh) as life:
        assert life.source is None
        save(life, 5)
    monkeypatch.setattr(owner, "agent_id", lambda: 12345)  # other agents, on other nodes
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_RESTART_COUNT", "1")
        with a_life(afresh) as life:
            assert is_at(life.state, 5)
    monkeypatch.setattr(owner, "agent_id", lambda: 1234567)  # typed a second time within one allocation
    with a_life(afresh) as life:
        assert life.source is None


def killed_at_call(k, opts):
    """A life of this run in a child that dies at its k-th rename or mkdir; whether it came to that."""
    count = []

    def counting(real):
        def call(*args, **kwargs):
            count.append(args)
            if len(count) == k:
                os._exit(9)
            return real(*args, **kwargs)
        return call

    def live():
        os.rename, os.mkdir = counting(os.rename), counting(os.mkdir)
        with a_life(opts):
            os._exit(0)

    with child(live) as pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_starting_afresh_killed_half_way_is_ended_by_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setattr(owner, "agent_id", lambda: 7)
    for k in range(1, 30):
        with monkeypatch.context() as patch:
            patch.setattr(owner, "agent_id", lambda: 6)
            opts, _ = two_checkpoints(tmp_path / str(k), steps=(1, 2, 3), keep=9)
        afresh = options(tmp_path / str(k), resume="none", keep=9)
        if not killed_at_call(k, afresh):
            break
        with a_life(afresh) as life:  # the same agent starts it again
            assert life.source is None and steps_of(opts) == [], k
        kept = [path.parts[-3:] for path in opts.run_dir.glob("before-*/checkpoints/*")]
        assert sorted(kept) == [("before-1", "checkpoints", f"step-0000000{n}") for n in (1, 2, 3)], k
    assert 10 < k < 29


def test_a_checkpoint_of_this_run_that_is_not_its_newest_cannot_be_resumed_from(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(owner, "agent_id", lambda: 6)  # another agent than that of the lives to come
        opts, root = two_checkpoints(tmp_path)
    text = refused(options(tmp_path, resume=str(root / "step-00000001")),
                   "resumes from its newest checkpoint, step 2")
    assert "--run-dir" in text
    with a_life(options(tmp_path / "other", resume=str(root / "step-00000001"))) as life:
        assert is_at(life.state, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    with a_life(options(tmp_path, resume=str(root / "step-00000002"))) as life:
        save(life, 3)
    with a_life(options(tmp_path, resume=str(root / "step-00000002"))) as life:
        assert is_at(life.state, 3)  # an agent restarts with the same words


def test_an_unsaved_buffer_of_an_editor_is_no_code(tmp_path, monkeypatch):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "state.py").write_text("x = 1")
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "common" / "identity.py"))
    before = identity.versions(options(tmp_path), "f" * 64)
    (tmp_path / "common" / ".#state.py").symlink_to("me@host.1234:1")  # as emacs does: it dangles
    assert identity.versions(options(tmp_path), "f" * 64) == before


def test_a_byte_changed_in_any_file_makes_it_another_code(tmp_path, monkeypatch):
    root = Path(identity.__file__).parents[[p.name for p in Path(identity.__file__).parents].index("common")
                                           + 1]
    names = [path.relative_to(root) for path in [*root.glob("train_*.py"), *(root / "common").rglob("*.py")]]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((root / name).read_bytes())
    monkeypatch.setattr(identity, "__file__", str(tmp_path / Path(identity.__file__).relative_to(root)))

    def code():
        return identity.versions(Options(), "f" * 64)["code"]

    seen = {code()}
    for name in names:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"#")
        seen.add(code())
    assert len(names) > 45 and len(seen) == 1 + len(names)


# ---- the sum over weights -------------------------------------------------------------------------
def test_every_flipped_bit_and_every_swap_between_tensors_changes_the_sum():
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(3, 5), "c": torch.randn(7).bfloat16(),
               "d": torch.tensor([True, False]),
               "e": torch.tensor(3), "f": torch.zeros(0),
               "g": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)}
    whole = fingerprint_of(tensors)
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for bit in range(flat.numel() * 8):
            changed = flat.clone()
            changed[bit // 8] ^= 1 << bit % 8
            assert fingerprint_of(tensors
                                  | {name: changed.view(tensor.dtype).view(tensor.shape)}) != whole, (name,
                                                                                                      bit)
    assert fingerprint_of(tensors | {"a": tensors["b"], "b": tensors["a"]}) != whole
    assert torch.tensor([whole]).item() == whole


def test_the_sum_does_not_depend_on_where_or_how_a_tensor_lies():
    whole = torch.randn(101)
    for start in range(4):
        part = whole[start:start + 64]
        assert fingerprint_of({"a": part}) == fingerprint_of({"a": part.clone()})
    image = torch.randn(2, 3, 4, 5)
    assert fingerprint_of({"a": image}) == fingerprint_of({"a": image.to(memory_format=torch.channels_last)})


def test_the_nets_of_the_three_scripts_have_bare_names(tmp_path):
    store, state = new_store(options(tmp_path)), tiny_state(options(tmp_path), tiny_net())
    store.restore(state)
    assert not [name for part in state.tensors().values() for name in part if "module." in name
                or "_orig_mod" in name]
    end(store)
