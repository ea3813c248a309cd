"""What a door hands out says its types, so that an editor can jump and a checker can look; nothing else has
to.
"""

import ast
import importlib
import inspect
import sys

import pytest
import torch
from jobs import ran
from test_house import FILES, HEIGHT, door, imports, tree_of
from torch import nn
from torch.nn.modules import batchnorm
from torch.utils.data import dataloader

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
    torch.ones(1): ("_backward_hooks", "_version"),
    torch: ("_foreach_add_", "_foreach_copy_", "_foreach_div_", "_foreach_lerp_", "_foreach_norm"),
    torch.amp.GradScaler: ("_found_inf_per_device",),
    nn.parallel.DistributedDataParallel: ("_check_reducer_finalized",),
    torch.distributed.distributed_c10d: ("_set_pg_timeout",),  # where torch has no set_timeout
    batchnorm: ("_NormBase",),
    torch._utils: ("_flatten_dense_tensors", "_unflatten_dense_tensors"),
    dataloader: ("_MultiProcessingDataLoaderIter",),  # it has `_workers`
}
OF_PYTHON = {"_exit", "_current_frames", "_replace", "_make"}


def functions(thing):
    """Those that a door hands out with this: itself, or the methods of a class that have no underscore."""
    if not inspect.isclass(thing):
        return [thing] if inspect.isfunction(thing) else []
    inside = [getattr(value, "fget", getattr(value, "__func__", value)) for value in vars(thing).values()]
    found = {function.__name__: function for function in inside if inspect.isfunction(function)}
    return [found[name] for name in found if name == "__init__" or not name.startswith("_")]


def untyped(function):
    """What a function's signature leaves open, in words."""
    given = inspect.signature(function)
    names = [name for name, it in given.parameters.items() if it.annotation is it.empty]
    if given.return_annotation is given.empty and function.__name__ != "__init__":
        names.append("-> ?")
    return [f"{function.__qualname__} {name}" for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("room", HEIGHT)
def test_all_that_a_door_hands_out_says_its_types(room):
    inside = importlib.import_module(f"common.{room}")
    handed_out = [function for name in door(room) for function in functions(getattr(inside, name))]
    missing = [what for function in handed_out for what in untyped(function)]
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
    done = ran(*mypy)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "wrong.py").write_text("from common.sampler import share\n\nshare('four', 1, 2)\n")
    done = ran(*mypy, tmp_path / "wrong.py")
    assert done.returncode == 1 and "arg-type" in done.stdout, (
        "a checker that finds nothing wrong anywhere checks nothing"
    )
