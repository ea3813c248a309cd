"""The rules of the house, of which a careless edit breaks one without any other test noticing."""
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import common

ROOT = Path(__file__).resolve().parents[1]
COMMON = sorted((ROOT / "common").glob("*.py"))
SCRIPTS = sorted(ROOT.glob("train_*.py"))
MAP = re.findall(r"^(\w+)  +\S", common.__doc__, re.MULTILINE)
TORCHLESS = ("common", "common.ledger", "common.log", "common.files", "common.metrics", "common.environment", "common.flags",
             "common.options")
MOST_LINES = 260

COLLECTIVE = {"meeting", "world", "reduce", "pipeline", "bitwise", "line"}              # these alone say torch.distributed
# os.environ: torchrun's word to a process is for these, the terminal's for log, the names of GPUs for opening.
ENVIRON = {"meeting", "world", "environment", "options", "rescue", "processes", "pinned", "log", "opening"}
TOP_LEVEL = {"README.md", "requirements.txt", "train_ddp.py", "train_dp.py", "train_mp.py", "common", "launch", "tests"}
MADE_BY_USE = {"runs", "data", "__pycache__"}


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """Every module a file imports, at its top or inside a function; of `from common import log` also common.log."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def says(path, dotted):
    """Lines on which a file names `sys.argv` and the like; what runs under `if __name__ == "__main__"` is left out."""
    tree = tree_of(path)
    mains = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.dump(node.test)]
    skipped = {id(inner) for node in mains for inner in ast.walk(node)}
    return [node.lineno for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == dotted and id(node) not in skipped]


def test_the_map_in_common_lists_every_file_once():
    assert sorted(MAP) == [path.stem for path in COMMON if path.stem != "__init__"], "mend the list in common/__init__.py"


@pytest.mark.parametrize("path", COMMON, ids=lambda path: path.stem)
def test_imports_in_common_point_up_the_map_and_never_to_a_script(path):
    above = MAP[:MAP.index(path.stem)] if path.stem in MAP else []
    for name in imports(path):
        head, _, rest = name.partition(".")
        assert not head.startswith(("train_", "launch", "tests")), f"common/{path.name} imports {name}"
        part = rest.partition(".")[0]
        if head == "common" and part in MAP:
            assert part in above, f"common/{path.name} imports common.{part}, which is not above it in common/__init__.py"


@pytest.mark.parametrize("path", COMMON, ids=lambda path: path.stem)
def test_only_who_must_says_torch_distributed_and_looks_at_arguments_or_environment(path):
    if path.stem not in COLLECTIVE:
        assert not [name for name in imports(path) if name.startswith("torch.distributed")]
        assert not says(path, "torch.distributed")
    if path.stem != "options":
        assert not says(path, "sys.argv")
    if path.stem not in ENVIRON:
        assert not says(path, "os.environ") and not says(path, "os.getenv")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_asks_for_no_rank_and_calls_no_collective(path):
    named = {name for name in imports(path) if name.startswith("torch.distributed")}
    assert all("elastic" in name for name in named), named
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Compare | ast.If | ast.IfExp | ast.BoolOp):
            inside = [node] if isinstance(node, ast.Compare) else [getattr(node, "test", None) or node]
            ranks = [ast.unparse(n) for part in inside for n in ast.walk(part)
                     if getattr(n, "attr", getattr(n, "id", "")) in ("rank", "local_rank", "node")]
            assert not ranks, f"{path.name}, line {node.lineno} depends on {ranks}: let common/ be quiet on the other ranks"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_optimizer_steps_within_30_lines_of_the_loop_over_batches(path):
    lines = path.read_text().splitlines()
    loop = next(i for i, line in enumerate(lines) if line.strip().startswith("for batch in"))
    assert any("state.update(" in line for line in lines[loop:loop + 30])


def test_options_and_what_they_need_import_without_torch_or_numpy():
    code = f"import sys, {', '.join(TORCHLESS)}; print([n for n in ('torch', 'numpy', 'tqdm') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_no_file_is_longer_than_one_noun_needs():
    paths = [*COMMON, *SCRIPTS, *(ROOT / "launch").iterdir()]
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in paths if path.is_file()}
    assert not {name: n for name, n in lengths.items() if n > MOST_LINES}, "which second noun is in there?"


def test_the_top_level_holds_what_was_agreed_on():
    assert {name for name in os.listdir(ROOT) if not name.startswith(".")} - MADE_BY_USE == TOP_LEVEL


def test_no_file_names_a_place_of_one_machine():
    homes = re.compile("/(" + "|".join(("work", "home", "root", "Users", "tmp/team")) + ")/")
    for path in [p for folder in ("common", "launch", "tests", ".github", ".ci") for p in (ROOT / folder).rglob("*")] + [
            *SCRIPTS, ROOT / "README.md"]:
        if path.is_file() and path.suffix != ".pyc":
            named = homes.search(path.read_text(encoding="utf-8", errors="replace"))
            assert not named, f"{path.relative_to(ROOT)}: {named[0]}"


def test_ruff_finds_nothing():
    pytest.importorskip("ruff")
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
