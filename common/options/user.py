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
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import UserError, blamed, is_foreign
from common.options.options import Options, read_run
from common.options.registry import EXTRAS, NAMES
from common.options.rules import flag_of
from common.sealed import is_marked, sha


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
        refuse_other_neighbours(path)
    return module


def refuse_other_neighbours(path):
    """UserError if a module that a file imports lies beside it, and another was taken for it."""
    for own, importer in files_of(path).items():
        name = own.parent.name if own.stem == "__init__" else own.stem
        taken = getattr(sys.modules.get(name), "__file__", None)
        beside = own == path.parent / f"{name}.py" or own == path.parent / name / "__init__.py"
        if own != path and beside and taken and own.resolve() != Path(taken).resolve():
            raise UserError(
                f"{importer} imports {name}, for which {taken} was taken\n"
                f"to have the one beside it, rename it, or use a Python that has imported no other {name}"
            )


def files_of(path):
    """{file: the one that imports it}: a user's file, what it imports from its folder, packages whole."""
    found = {path: path}
    for importer in (todo := [path]):  # it grows
        for name in sorted({*imports_of(importer)} - sys.stdlib_module_names):
            module = path.parent / f"{name}.py"
            for own in [module] if module.is_file() else sorted(Path(path.parent, name).rglob("*.py")):
                if own not in found and not is_foreign(own):
                    found[own] = importer
                    todo.append(own)
    return found


def imports_of(path):
    """Yield the first words of what a file imports, anywhere in it; nothing if Python cannot read it."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.partition(".")[0]


def code_of(opts: Options) -> dict[str, str]:
    """Return {"code of FILE": hash} of the script, of files that flags name, and of what these import."""
    named = [str(getattr(opts, name)).rpartition(":")[0] for name in NAMES]
    code = {}
    for path in filter(Path.is_file, map(Path, (sys.argv[0], *named))):
        for file in files_of(path.resolve()):
            name = f"code of {file.name}"
            code[name] = sha(code.get(name, "").encode() + text_of(file))[:12]
    return code


def refuse_foreign_code(run_dir: Path | str, flags: dict[str, Any]) -> None:
    """UserError if these flags of a run name a file, unless this user has begun the run with it.

    Even then one in its folder, or of another user than us and root, may be a stranger's.
    """
    is_ours = is_marked(read_run(run_dir))
    for name, value in flags.items():
        path = Path(str(value).rpartition(":")[0]).resolve()
        inside = path.is_relative_to(Path(run_dir).resolve())
        is_own = is_ours and not inside and path.is_file() and path.stat().st_uid in (0, os.getuid())
        if path.is_file() and not is_own:
            raise UserError(
                f"{run_dir} would run {value}: a file in that folder, of another user, or of a run that you "
                "have not begun\n"
                f"read it; if you trust it, name it yourself: {flag_of(name)} {value}"
            )
