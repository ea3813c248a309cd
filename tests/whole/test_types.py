"""What a door hands out says its types, so that an editor can jump and a checker can look; nothing else has
to.
"""

import ast
import subprocess
import sys

import pytest
import torch
from test_house import FILES, FLOORS, HOUSE, ROOT, door, imports, tree_of
from torch import nn
from torch.nn.modules import batchnorm
from torch.utils.data import dataloader

ROOMS = [room for floor in FLOORS for room in floor]
# What torch promises to nobody and common/ uses: a release may take it away. {owner: names}
PRIVATE = {
    nn.Module(): (
        "_modules",
        "_parameters",
        "_buffers",
        "_non_persistent_buffers_set",
        "_forward_hooks",
        "_forward_pre_hooks",
    ),
    torch.ones(1): ("_backward_hooks",),
    torch: ("_foreach_add_", "_foreach_copy_", "_foreach_div_", "_foreach_lerp_", "_foreach_norm"),
    torch.amp.GradScaler: ("_found_inf_per_device",),
    nn.parallel.DistributedDataParallel: ("_check_reducer_finalized",),
    torch.distributed.distributed_c10d: ("_set_pg_timeout",),  # where torch has no set_timeout
    batchnorm: ("_NormBase",),
    dataloader: ("_MultiProcessingDataLoaderIter",),  # it has `_workers`
}
OF_PYTHON = {"_exit", "_current_frames", "_replace", "_make"}


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


def private_names(path):
    """Those with an underscore that a file takes from others."""
    taken = {name for module, name in imports(path) if not module.startswith("common")}
    taken |= {
        node.attr
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls")
    }
    return {name for name in taken if name.startswith("_") and not name.startswith("__")} - OF_PYTHON


def test_private_names_of_torch_are_listed_and_this_torch_has_them():
    used = set().union(*map(private_names, FILES))
    assert used - {"_workers"} <= {name for names in PRIVATE.values() for name in names}
    assert "_modules" in used, "a test that finds nothing checks nothing"
    for owner, names in PRIVATE.items():
        for name in names:
            assert hasattr(owner, name), (owner, name)
    assert "_workers" in dataloader._MultiProcessingDataLoaderIter.__init__.__code__.co_names


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
