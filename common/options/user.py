"""Functions by their names: `path/to/file.py:function` is a user's, `package.module:function` is ours.

From a flag to the function: the file or module is imported, the function found in it, and called with as many
arguments as it requires. Its errors are told with its name.
"""

import ast
import functools
import importlib
import inspect
import linecache
import os
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import UserError, blamed, is_foreign
from common.options.options import Options, read_run
from common.options.registry import NAMES
from common.options.rules import flag_of
from common.options.sealed import is_marked, sha


def find_function(place: str, *default: None) -> Any:
    """The function that `place` names; `default`, if one is given and there is no such function."""
    module, _, name = place.rpartition(":")
    with blamed(place):
        if module.endswith(".py"):
            return getattr(load_file(Path(module).resolve()), name, *default)
        return getattr(importlib.import_module(module), name, *default)


def call_user(place: str, *arguments: object, first: bool = False) -> Any:
    """Calls a user's function with the last of `arguments`, as many as it requires; with `first`, the first.

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
def load_file(path):
    """The module in a file, loaded once in this process; it can import files of its own folder."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: it must not hide common or the standard library
    name = f"user_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    linecache.getlines(str(path))  # for `code_of`
    # its source: a cached .pyc may be that of a text of the same second and size
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
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
    """The first words of what a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def code_of(opts: Options) -> dict[str, str]:
    """{"code of FILE": hash} of the script, the files that flags name, and what these import beside them.

    Of the text as this process has read it first: a fork server may have done so before an edit.
    """
    values = [str(getattr(opts, name)) for name in NAMES]
    named = [value.rpartition(":")[0] for value in values if ".py:" in value]
    code = {}
    for path in map(Path, (sys.argv[0], *named)):
        for file in files_of(path.resolve()) if path.is_file() else ():
            text = "".join(linecache.getlines(str(file)))
            name = f"code of {file.name}"
            code[name] = sha((code.get(name, "") + text).encode())[:12]
    return code


def files_of(path):
    """A user's file and those that it imports from its folder, of a package all."""
    found = [path]
    for file in found:  # it grows
        with suppress(SyntaxError, ValueError):  # a package may have more than Python imports
            for name in sorted({*imports_of(file)}):
                module = path.parent / f"{name}.py"
                more = [module] if module.is_file() else sorted(Path(path.parent, name).rglob("*.py"))
                found += [own for own in more if own not in found and not is_foreign(own)]
    return found


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
