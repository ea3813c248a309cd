"""Whose code a run runs, and whether it is still the same: the mark of its user, and the fact `code`."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import PACED, ROOT, lives, ran
from ranks import fork_ranks
from refusals import refusal
from stores import a_life, new_store, options, save, tiny_net, tiny_state, two_checkpoints

from common.errors import UserError
from common.extras.own_files import is_marked
from common.extras.rehearsed import was_rehearsed
from common.ledger import Ledger
from common.models import load
from common.options import Options, parse_options, read_options
from common.options.options import read_run
from common.options.user import code_of, text_of
from common.replay import main as replay
from common.sealed import marked, own_key, sealed, unsealed

COMMIT = ("-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-q")
NET = "open('ran', 'w')\nfrom parts import net\n"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def test_the_key_is_made_once_and_no_other_user_can_read_it(config):
    first = own_key()
    assert len(first) == 32 and own_key() == first
    folder = config / "train_ddp"
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "key")] == [0o700, 0o600]


def test_a_key_is_there_once_it_is_whole(config, monkeypatch):
    def fails(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("os.urandom", fails)
        assert own_key() == b""
    assert len(own_key()) == 32


def test_a_mark_is_of_each_value_and_of_this_key(config):
    value = marked({"options": {"model": "net.py:net"}})
    assert is_marked(value) and is_marked(json.loads(json.dumps(value)))
    assert not is_marked(value | {"options": {"model": "other.py:net"}})
    assert not is_marked({"options": {}}) and not is_marked({"options": {}, "mark": ""})
    (config / "train_ddp/key").rename(config / "away")
    assert not is_marked(value)


def test_without_a_home_no_run_is_known_as_ones_own_and_training_begins_all_the_same(
    tmp_path, config, monkeypatch
):
    config.write_text("a file, so that no folder can be made")
    assert own_key() == b""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody_at_all").expanduser())
    assert not was_rehearsed(Options())
    opts, _ = two_checkpoints(tmp_path)
    assert not is_marked(read_run(opts.run_dir))


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """A folder as one unpacks it: a run, and the code that it names beside it."""
    net = tiny_net()
    net._facts = {"tied": {}, "data": {"sample_shape": [3]}}
    opts, _ = two_checkpoints(tmp_path, net=net, model="net.py:net")
    Ledger(opts.run_dir).event("life", life="aa", world=1, step=0, epochs=1)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return opts


def of_a_stranger(run):
    facts = read_run(run)
    facts["options"] |= {"model": "net.py:net", "workers": 5000, "download": True}
    (run / "options.json").write_bytes(sealed(facts))


def test_a_strangers_file_beside_a_run_runs_by_no_command_that_does_not_name_it(experiment, capfd):
    run = experiment.run_dir
    of_a_stranger(run)
    fork = [f"--fork={run}", "--at=1", f"--run-dir={run}2"]
    with pytest.raises(SystemExit, match="2"):
        parse_options("", fork, "ddp")
    assert "would run net.py:net" in capfd.readouterr().err
    with refusal("would run net.py:net(.|\n)*name it yourself: --model net.py:net"):
        load(run, 2)
    assert replay(["verify", str(run), "--from=1"]) == 2
    assert "would run net.py:net" in capfd.readouterr().err
    assert not Path("ran").exists()
    opts = parse_options("", [*fork, "--model=net.py:net"], "ddp")
    assert (opts.workers, opts.download) == (0, False), "nor does it choose what this machine does"


def test_a_run_that_this_user_has_begun_names_its_files_itself(experiment):
    run = experiment.run_dir
    opts = parse_options("", [f"--fork={run}", "--at=1", f"--run-dir={run}2"], "ddp")
    assert opts.model == read_options(run)["model"] == str(Path("net.py").absolute()) + ":net"


def test_resuming_asks_for_no_mark_and_makes_the_run_ones_own(experiment):
    of_a_stranger(experiment.run_dir)
    with a_life(experiment) as life:
        assert life.state.progress.step == 2
    assert is_marked(read_run(experiment.run_dir))


def test_a_life_tells_the_commit_of_its_scripts_folder_or_none(jobs, tmp_path):
    """To resume with the version that wrote a run, one has to know it."""
    script = tmp_path / "train_ddp.py"
    script.write_text((ROOT / "train_ddp.py").read_text())
    words = [script, *PACED, "--max-steps=1", f"--run-dir={tmp_path}/run"]
    jobs.python(*words, PYTHONPATH=str(ROOT)).ends_with(0)
    ran("git", "init", "-q", tmp_path)
    ran("git", "-C", tmp_path, *COMMIT, "--allow-empty", "-m", "first")
    head = ran("git", "-C", tmp_path, "rev-parse", "HEAD").stdout.strip()
    jobs.python(*words[:-2], "--max-steps=2", words[-1], PYTHONPATH=str(ROOT)).ends_with(0)
    assert [life["commit"] for life in lives(tmp_path / "run")] == ["", head]


# ---- the same code ----------------------------------------------------------------------------------
def write_code(folder, value=1):
    """A model's file that imports a module and two packages, one without __init__.py, from its folder."""
    for name in ("package", "bare"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "package/__init__.py").write_text("from .deep import x\n")
    (folder / "package/deep.py").write_text(f"x = {value}\n")
    (folder / "bare/part.py").write_text("import module\n")
    (folder / "module.py").write_text("import json\n")
    (folder / "unused.py").write_text("")
    (folder / "net.py").write_text("import torch, package\nfrom bare.part import x\n")
    text_of.cache_clear()
    return f"{folder}/net.py:net"


def test_the_code_of_a_run_is_its_script_the_files_of_flags_and_what_they_import_beside_them(
    tmp_path, monkeypatch
):
    script = tmp_path / "my_loop.py"
    script.write_text("import helper, torch, common\n")
    (tmp_path / "helper.py").write_text("this is no Python")
    monkeypatch.setattr("sys.argv", [str(script)])
    opts = options(tmp_path, model=write_code(tmp_path / "code"), dataset="random")
    names = {name.removeprefix("code of ") for name in code_of(opts)}
    assert names == {
        *("my_loop.py", "helper.py"),
        *("net.py", "__init__.py", "deep.py", "part.py", "module.py"),
    }
    before = code_of(opts)
    write_code(tmp_path / "code", value=2)
    after = code_of(opts)
    assert [name for name in before if before[name] != after[name]] == ["code of deep.py"]


def test_code_is_known_as_this_process_has_read_it(tmp_path):
    """A fork server reads once: an edit under a running job changes nothing, and is not told."""
    opts = options(tmp_path, model=write_code(tmp_path / "code"))
    before = code_of(opts)
    (tmp_path / "code/net.py").write_text("")
    assert code_of(opts) == before


@pytest.mark.parametrize("virtual_ranks, told_again", [(0, False), (2, True)])
def test_a_life_that_finds_other_code_than_the_one_before_says_one_line(tmp_path, virtual_ranks, told_again):
    opts = options(tmp_path, model=write_code(tmp_path / "code"), virtual_ranks=virtual_ranks)

    def told(step):
        said = []
        with a_life(opts, said=said) as life:
            save(life, step)
        return [line for line in said if "code of" in line]

    assert told(1) == told(2) == []
    first = read_run(opts.run_dir)["code"]
    write_code(tmp_path / "code", value=2)
    (line,) = told(3)
    assert line.startswith(f"the code of deep.py was {first['code of deep.py']}, now ")
    assert bool(told(4)) is told_again
    assert (read_run(opts.run_dir)["code"] == first) is told_again


def a_rank_with_code_of_its_own(world, folder):
    opts = options(folder, model=write_code(folder / str(world.rank), value=world.rank))
    try:
        new_store(opts, world).restore(tiny_state(opts))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_whose_code_differs_are_refused_by_its_name(tmp_path):
    for text in fork_ranks(2, a_rank_with_code_of_its_own, tmp_path):
        assert "the ranks run different things: rank 0 has code of deep.py" in text, text


def test_it_takes_its_options_from_a_run_of_one_user_only(tmp_path, config):
    opts, _ = two_checkpoints(tmp_path)
    key = config / "train_ddp/key"
    os.rename(key, f"{key}2")
    with a_life(replace(opts, epochs=7)):
        pass
    assert is_marked(read_run(opts.run_dir)) and own_key() != Path(f"{key}2").read_bytes()


def test_a_file_that_is_not_as_its_seal_says_is_not_parsed_and_a_right_one_is_parsed_once(monkeypatch):
    parsed = []
    real = json.loads
    monkeypatch.setattr(json, "loads", lambda text: [parsed.append(text), real(text)][1])
    data = sealed({"b": 1, "a": [{}]})
    assert data.count(b"\n") == 1, "with indent it would be written by Python, not by C"
    for at in range(len(data)):
        with pytest.raises(ValueError, match="its own seal"):
            unsealed(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert not parsed
    assert unsealed(data) == {"a": [{}], "b": 1} and len(parsed) == 1
