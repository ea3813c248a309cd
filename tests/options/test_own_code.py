"""Whose code a run runs, and whether it is still the same: the mark of its user, and the fact `code`."""

import json
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from jobs import ran
from ranks import fork_ranks
from stores import a_life, options, refused, save, two_checkpoints

from common.extras.own_files import is_marked
from common.options import commit, parse_options
from common.options.options import read_run
from common.options.user import bytes_of, code_of
from common.sealed import marked, own_key, sealed, unsealed

NET = "open('ran', 'w')\nfrom parts import net\n"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def test_the_key_is_made_once_and_whole_and_no_other_user_can_read_it(config, monkeypatch):
    with monkeypatch.context() as full_disk:
        full_disk.setattr("os.urandom", Mock(side_effect=OSError))
        assert own_key() == b""
    first = own_key()
    assert len(first) == 32 and own_key() == first
    folder = config / "train_ddp"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "key")] == [0o700, 0o600]


def test_a_mark_is_of_each_value_and_of_this_key(config):
    value = marked({"options": {"model": "net.py:net"}})
    assert is_marked(json.loads(json.dumps(value)))
    assert not is_marked(value | {"options": {"model": "other.py:net"}})
    assert not is_marked({"options": {}}) and not is_marked({"options": {}, "mark": ""})
    (config / "train_ddp/key").unlink()
    assert not is_marked(value)


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """A folder as one unpacks it: a run, and the code that it names beside it."""
    opts, _ = two_checkpoints(tmp_path, model="net.py:net")
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return opts


def fork(run, *words):
    return parse_options("", [f"--fork={run}", "--at=1", f"--run-dir={run}2", *words], "ddp")


def of_a_stranger(run):
    facts = read_run(run)
    facts["options"] |= {"model": "net.py:net", "workers": 5000, "download": True}
    (run / "options.json").write_bytes(sealed(facts))


def test_a_strangers_file_beside_a_run_runs_by_no_command_that_does_not_name_it(experiment, capfd):
    """A command that loads a run is asked in test_load.py, a replay in test_verify.py."""
    of_a_stranger(experiment.run_dir)
    with pytest.raises(SystemExit, match="2"):
        fork(experiment.run_dir)
    said = capfd.readouterr().err
    assert "would run net.py:net" in said and "name it yourself: --model net.py:net" in said
    assert not Path("ran").exists()
    opts = fork(experiment.run_dir, "--model=net.py:net")
    assert (opts.workers, opts.download) == (0, False), "nor does it choose what this machine does"


def test_a_run_that_this_user_has_begun_names_its_files_itself(experiment):
    assert fork(experiment.run_dir).model == f"{Path('net.py').absolute()}:net"


def test_resuming_asks_for_no_mark_and_makes_the_run_ones_own(experiment):
    of_a_stranger(experiment.run_dir)
    with a_life(experiment) as life:
        assert life.state.progress.step == 2
    assert is_marked(read_run(experiment.run_dir))


def test_a_life_tells_the_commit_of_its_scripts_folder_or_none(tmp_path, monkeypatch):
    """To resume with the version that wrote a run, one has to know it."""
    monkeypatch.setattr("sys.argv", [f"{tmp_path}/my_loop.py"])
    assert commit() == ""
    git = ("git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@example.org")
    ran(*git, "init", "-q")
    ran(*git, "commit", "-q", "--allow-empty", "-m", "first")
    assert commit() == ran(*git, "rev-parse", "HEAD").stdout.strip() != ""


# ---- the same code ----------------------------------------------------------------------------------
def write_code(folder, value=1):
    """A model's file that imports a module and a package from its folder."""
    (folder / "package").mkdir(parents=True, exist_ok=True)
    (folder / "package/__init__.py").write_text("from .deep import x\nimport module\n")
    (folder / "package/deep.py").write_text(f"x = {value}\n")
    (folder / "module.py").write_text("import json\n")
    (folder / "unused.py").write_text("")
    (folder / "net.py").write_text("import torch, package\n")
    bytes_of.cache_clear()
    return f"{folder}/net.py:net"


def test_the_code_of_a_run_is_its_script_the_files_of_flags_and_what_they_import_beside_them(
    tmp_path, monkeypatch
):
    script = tmp_path / "my_loop.py"
    script.write_text("import helper, torch, common\n")
    (tmp_path / "helper.py").write_text("this is no Python")
    (tmp_path / "torch").mkdir()  # no package: Python takes the library
    (tmp_path / "torch/copied.py").touch()
    monkeypatch.setattr("sys.argv", [str(script)])
    opts = options(tmp_path, model=write_code(tmp_path / "code"), dataset="random")
    before = code_of(opts)
    names = "my_loop.py", "helper.py", "net.py", "__init__.py", "deep.py", "module.py"
    assert {*before} == {f"code of {name}" for name in names}
    (tmp_path / "code/net.py").write_text("")
    assert code_of(opts) == before, "as this process has read it: an edit under a running job changes nothing"
    write_code(tmp_path / "code", value=2)
    after = code_of(opts)
    assert [name for name in before if before[name] != after[name]] == ["code of deep.py"]


@pytest.mark.parametrize("virtual_ranks, told_again", [(0, 0), (2, 1)])
def test_a_life_that_finds_other_code_than_the_one_before_says_one_line(tmp_path, virtual_ranks, told_again):
    opts = options(tmp_path, model=write_code(tmp_path / "code"), virtual_ranks=virtual_ranks)

    def told(step):
        with a_life(opts) as life:
            save(life, step)
        return [line for line in life.said if "code of" in line]

    assert told(1) == told(2) == []
    first = read_run(opts.run_dir)["code"]
    write_code(tmp_path / "code", value=2)
    (line,) = told(3)
    assert line.startswith(f"the code of deep.py was {first['code of deep.py']}, now ")
    assert told(4) == [line] * told_again


def a_rank_with_code_of_its_own(world, folder):
    opts = options(folder, model=write_code(folder / str(world.rank), value=world.rank))
    refused(opts, "the ranks run different things: rank 0 has code of deep.py", world=world)


def test_ranks_whose_code_differs_are_refused_by_its_name(tmp_path):
    fork_ranks(2, a_rank_with_code_of_its_own, tmp_path)


def test_a_file_that_is_not_as_its_seal_says_is_not_parsed(monkeypatch):
    data = sealed({"b": 1, "a": [{}]})
    assert data.count(b"\n") == 1, "with indent it would be written by Python, not by C"
    assert unsealed(data) == {"a": [{}], "b": 1}
    monkeypatch.setattr(json, "loads", Mock(side_effect=AssertionError))
    for at in range(len(data)):
        with pytest.raises(ValueError, match="its own seal"):
            unsealed(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
