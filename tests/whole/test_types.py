"""What a door hands out says its types, so that an editor can jump and a checker can look; nothing else has
to.
"""

import inspect
import sys

import pytest
from jobs import ran
from test_house import HEIGHT, door


def functions(thing):
    """A function itself, or the methods of a class that have no underscore."""
    found = [thing, *(member for _, member in inspect.getmembers(thing))]
    ours = [it for it in found if inspect.isfunction(it) and it.__module__.startswith("common.")]
    return [it for it in ours if it.__name__ == "__init__" or not it.__name__.startswith("_")]


def untyped(function):
    """What a function's signature leaves open, in words."""
    given = inspect.signature(function)
    names = [name for name, it in given.parameters.items() if it.annotation is it.empty]
    if given.return_annotation is given.empty and function.__name__ != "__init__":
        names.append("-> ?")
    return [f"{function.__qualname__} {name}" for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("room", HEIGHT)
def test_all_that_a_door_hands_out_says_its_types(room):
    handed_out = [function for thing in door(room).values() for function in functions(thing)]
    missing = [what for function in handed_out for what in untyped(function)]
    assert not missing, f"common/{room} hands this out without types: {', '.join(missing)}"


def test_a_type_checker_finds_nothing(tmp_path):
    pytest.importorskip("mypy")
    done = ran(sys.executable, "-m", "mypy", "--config-file", ".mypy.ini", "--cache-dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
