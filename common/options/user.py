"""Functions by their names: `path/to/file.py:function` is a user's, `package.module:function` is ours.

From a flag to the function: the file or module is imported, the function found in it, and called with as many
arguments as it requires. Its errors are told with its name.
"""

import ast
import functools
import importlib
import inspect
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import UserError, blamed
from common.options.registry import EXTRAS
from common.options.rules import flag_of


def find_function(place: str, *default: None) -> Any:
    """Import the function that `place` names; `default`, if one is given and there is no such function."""
    module, _, name = place.rpartition(":")
    with blamed(place):
        if module.endswith(".py"):
            return getattr(load_file(Path(module).resolve()), name, *default)
        return getattr(importlib.import_module(module), name, *default)


def extra(name: str) -> Any:
    """Import what EXTRAS names: the one way from the core to an extra."""
    return find_function(EXTRAS[name])


def call_user(place: str, *arguments: object, first: bool = False) -> Any:
    """Call a user's function with the last of `arguments`, as many as it requires; with `first`, the first.

    Parameters with a default keep it: `f()`, `f(data)` and `f(opts, data, width=3)` can all build a model.
    """
    function = find_function(place)
    with blamed(place):
        required = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        count = min(len(required), len(arguments))
        return function(*(arguments[:count] if first else arguments[len(arguments) - count :]))


@functools.cache
def text_of(path: Path) -> bytes:
    """What is in a file. A launcher reads it at its start, for all lives: an edit changes none of them."""
    return path.read_bytes()


@functools.cache
def load_file(path):
    """Import the module in a file, once in this process; it can import files of its own folder."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: it must not hide common or the standard library
    name = f"user_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    # its source: a cached .pyc may be that of a text of the same second and size
    try:
        exec(compile(text_of(path), path, "exec"), vars(module))
    finally:  # an import that fails may be one of them
        refuse_other_neighbours(path, set())
    return module


def refuse_other_neighbours(path, seen):
    """UserError if a module that a file imports lies beside it, and one from elsewhere was taken for it."""
    seen.add(path)
    for name in imports_of(path):
        taken = getattr(sys.modules.get(name), "__file__", None)
        places = (path.parent / name / "__init__.py", path.parent / f"{name}.py")
        own = next(filter(Path.is_file, places), None)
        if not (taken and own) or name in sys.stdlib_module_names:
            continue
        if own.resolve() != Path(taken).resolve():
            raise UserError(
                f"{path} imports {name}, for which {taken} was taken\n"
                f"to have the one beside it, rename it, or use a Python that has imported no other {name}"
            )
        if own not in seen:
            refuse_other_neighbours(own, seen)


def imports_of(path):
    """Yield the first words of what a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def refuse_foreign_code(run_dir: Path | str, flags: dict[str, Any]) -> None:
    """UserError if these flags of a run name a file in its folder, or of another user than us and root."""
    for name, value in flags.items():
        path = Path(str(value).rpartition(":")[0]).resolve()
        inside = path.is_relative_to(Path(run_dir).resolve())
        if path.is_file() and (inside or path.stat().st_uid not in (0, os.getuid())):
            raise UserError(
                f"{run_dir} would run {value}: a file in that folder, or of another user\n"
                f"read it; if you trust it, name it yourself: {flag_of(name)} {value}"
            )
