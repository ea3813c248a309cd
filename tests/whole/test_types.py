"""What a door hands out says its types, so that an editor can jump and a checker can look; nothing else has
to.
"""

import importlib
import inspect
import sys

import pytest
from jobs import ran
from test_house import HEIGHT, door


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
