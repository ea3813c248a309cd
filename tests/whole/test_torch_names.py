"""common/torch_names.py lists each name that is used of torch's inside; one that is missing is told."""

import ast
import re

import pytest
from jobs import PACED, ROOT
from refusals import refusal

from common.options import parser
from common.torch_names import KNOWN_TO_WORK, TRAINING, missing
from launch.torch_names import LAUNCHER

# of Python, of other packages, and of this project
NOT_TORCHS = {"_exit", "_current_frames", "_popen", "_send_signal", "_forkserver"}
NOT_TORCHS |= {"_forkserver_alive_fd", "_forkserver_pid", "_run_exitfuncs", "_clear"}


def names_of(path):
    """(attributes and imports from torch that a file uses, what it defines: another may derive from it)."""
    used = set()
    made = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("torch"):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
    return used, made


def test_every_name_that_is_used_stands_in_the_table():
    tables = " ".join([*TRAINING.values(), *LAUNCHER.values()])
    known = NOT_TORCHS | {*re.split("[ /]", tables)}
    files = [names_of(path) for path in (*ROOT.glob("common/**/*.py"), *ROOT.glob("launch/*.py"))]
    unknown = set.union(*[used for used, _ in files]) - set.union(known, *[made for _, made in files])
    assert not [name for name in unknown if re.match("_[^_]", name)]


@pytest.mark.parametrize("where", ["torch", "torch:Nowhere", "torch.nowhere"])
def test_a_torch_that_lacks_a_name_is_told_with_those_that_are_known_to_work(where):
    said = missing({where: "_version/_lacks"})
    assert f"has no _version/_lacks in {where}" in said and f"torch {KNOWN_TO_WORK} is known" in said


def test_this_torch_lacks_none():
    assert missing(TRAINING) == missing(LAUNCHER) == ""


def test_a_training_refuses_a_torch_that_lacks_a_name_before_it_meets_others(monkeypatch, tmp_path):
    monkeypatch.setitem(TRAINING, "torch", "_foreach_lacks")
    with refusal("_foreach_lacks in torch"):
        parser.read_arguments([f"--run-dir={tmp_path}"], {})


LACKS = """
import runpy, sys
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
del DynamicRendezvousHandler._node_desc_generator
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_where_the_launcher_lacks_a_name_it_says_so_in_three_lines(jobs, tmp_path):
    (tmp_path / "lacks.py").write_text(LACKS)
    words = [ROOT / "launch/torchrun.py", ROOT / "train_ddp.py", *PACED]
    said = jobs.start(tmp_path / "lacks.py", *words, cwd=tmp_path).ends_with(2)
    assert "has no _node_desc_generator in" in said and "plain torchrun" in said
    assert len(said.splitlines()) <= 3 + 1 and "Traceback" not in said, said
