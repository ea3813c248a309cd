"""What a door hands out says its types, so that an editor can jump and a checker can look; nothing else has
to.
"""

import ast
import subprocess
import sys

import pytest
from test_house import FLOORS, HOUSE, ROOT, door, tree_of

ROOMS = [room for floor in FLOORS for room in floor]


def definitions(room):
    """{name: its definition} of all that the door of a room hands out; what is no function and no class is
    left out.
    """
    files = [HOUSE / f"{room}.py"] if (HOUSE / f"{room}.py").is_file() else (HOUSE / room).rglob("*.py")
    found = {node.name: node for path in files for node in tree_of(path).body if hasattr(node, "name")}
    return {name: found[name] for name in door(room) if name in found}


def untyped(function, owner=""):
    """What a function's signature leaves open, in words."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    open_ = [
        f"{owner}{function.name}({arg.arg})"
        for arg in every
        if arg.annotation is None and arg.arg not in ("self", "cls")
    ]
    return open_ + (
        [f"{owner}{function.name} -> ?"] if function.returns is None and function.name != "__init__" else []
    )


@pytest.mark.parametrize("room", ROOMS)
def test_all_that_a_door_hands_out_says_its_types(room):
    missing = []
    for name, node in definitions(room).items():
        if isinstance(node, ast.FunctionDef):
            missing += untyped(node)
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and (
                method.name == "__init__" or not method.name.startswith("_")
            ):
                missing += untyped(method, f"{name}.")
    assert bool(definitions(room)) == bool(door(room))
    assert not missing, f"common/{room} hands this out without types: {', '.join(missing)}"


def test_a_type_checker_finds_nothing(tmp_path):
    pytest.importorskip("mypy")
    mypy = [sys.executable, "-m", "mypy", "--config-file", ".mypy.ini", "--cache-dir", tmp_path]
    done = subprocess.run(
        mypy,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "wrong.py").write_text("from common.sampler import share\n\nshare('four', 1, 2)\n")
    done = subprocess.run(
        [*mypy, tmp_path / "wrong.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "arg-type" in done.stdout, (
        "a checker that finds nothing wrong anywhere checks nothing"
    )
