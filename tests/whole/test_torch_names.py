"""common/torch_names.py lists each name that is used of torch's inside; one that is missing is told."""

import ast

import pytest
from jobs import PACED, ROOT

from common import torch_names
from common.errors import UserError
from common.options import parser
from common.torch_names import TRAINING, missing
from launch.torch_names import LAUNCHER

NAMES = [(where, name) for table in (TRAINING, LAUNCHER) for where in table for name in table[where].split()]
# of Python, of other packages, and of this project
NOT_TORCHS = {"_exit", "_current_frames", "_popen", "_send_signal", "_forkserver"}
NOT_TORCHS |= {"_forkserver_alive_fd", "_forkserver_pid", "_run_exitfuncs", "_clear"}


def names_used(path):
    """Names with an underscore, of attributes and imports, that a file uses."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module.startswith("torch")]
    used |= {alias.name for node in imports for alias in node.names}
    return {name for name in used if name[0] == "_" and name[1] != "_"}


def names_made(path):
    """Names that a file defines: another one may use them in a class that it derives."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    return own | {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}


def test_every_name_that_is_used_stands_in_the_table():
    known = {choice for _, name in NAMES for choice in name.split("/")} | NOT_TORCHS
    files = [*ROOT.glob("common/**/*.py"), *ROOT.glob("launch/*.py")]
    known |= {name for path in files for name in names_made(path)}
    used = {name: path for path in files for name in names_used(path)}
    assert not used.keys() - known, {name: str(used[name]) for name in used.keys() - known}


def without(monkeypatch, where, names):
    """This torch lacks one."""
    real = torch_names.has
    lacks = names.split("/")
    owner = torch_names.pkgutil.resolve_name(where)
    monkeypatch.setattr(
        torch_names, "has", lambda place, name: not (place is owner and name in lacks) and real(place, name)
    )


@pytest.mark.parametrize("where, name", NAMES)
def test_a_torch_that_lacks_a_name_is_told_with_those_that_are_known_to_work(monkeypatch, where, name):
    without(monkeypatch, where, name)
    said = missing(TRAINING) or missing(LAUNCHER)
    assert f"has no {name} in {where}" in said and f"torch {torch_names.KNOWN_TO_WORK} is known" in said


@pytest.mark.parametrize("where", [*TRAINING, *LAUNCHER])
def test_a_torch_that_lacks_a_whole_module_or_class_is_told_too(monkeypatch, where):
    def resolve(place):
        raise ImportError(place)

    monkeypatch.setattr(torch_names, "pkgutil", type("", (), {"resolve_name": staticmethod(resolve)}))
    assert f"in {where}, which" in missing({where: ({} | TRAINING | LAUNCHER)[where]})


def test_this_torch_lacks_none():
    assert missing(TRAINING) == missing(LAUNCHER) == ""


def test_a_training_refuses_a_torch_that_lacks_a_name_before_it_meets_others(monkeypatch, tmp_path):
    without(monkeypatch, "torch", "_foreach_copy_")
    with pytest.raises(UserError, match="_foreach_copy_ in torch"):
        parser.read_arguments([f"--run-dir={tmp_path}"], {})


LACKS = """
import runpy, sys
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
del DynamicRendezvousHandler._node_desc_generator
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_where_the_launcher_lacks_a_name_it_says_so_in_three_lines_and_plain_torchrun_still_trains(
    jobs, run, tmp_path
):
    (tmp_path / "lacks.py").write_text(LACKS)
    train = [ROOT / "train_ddp.py", *PACED, "--max-steps=2", f"--run-dir={run}"]
    said = jobs.start(tmp_path / "lacks.py", ROOT / "launch/torchrun.py", *train).ends_with(2)
    assert "has no _node_desc_generator in" in said and "plain torchrun" in said
    assert len(said.splitlines()) <= 3 + 1 and "Traceback" not in said, said
    jobs.torchrun(2, "train_ddp.py", *train[1:], PACE="0").ends_with(0)
