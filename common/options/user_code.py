"""A user's own code: the function in `path/to/file.py:function`; its errors name file and line."""

import inspect
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import UserError, blamed


def check_user(spec: str) -> None:
    """UserError unless the file is there; it is not run."""
    path = spec.rpartition(":")[0]
    if not Path(path).is_file():
        raise UserError(f"{spec}: there is no file {path!r}\nwrite path/to/file.py:function")


def find_user(spec: str, *default: None) -> Any:
    """The function that `path/to/file.py:function` names; `default`, if one is given and there is none."""
    path, _, name = spec.rpartition(":")
    with blamed(spec):
        return getattr(load_file(path), name, *default)


def call_user(spec: str, *facts: object, first: bool = False) -> Any:
    """Calls the function in `path/to/file.py:function` with the last of `facts`, as many as it requires.

    Parameters with a default keep it: `f()`, `f(data)` and `f(opts, data, width=3)` can all build a model.
    With `first` it gets the first of them.
    """
    function = find_user(spec)
    with blamed(spec):
        required = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        count = min(len(required), len(facts))
        return function(*(facts[:count] if first else facts[len(facts) - count :]))


def load_file(path: str) -> ModuleType:
    """The module in a file, loaded once in this process; it can import files of its own folder."""
    path = str(Path(path).resolve())
    name = f"user_{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(Path(path).parent) not in sys.path:
        sys.path.append(str(Path(path).parent))  # last: it must not hide common or the standard library
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = path
    try:
        with blamed(path):  # its source: a cached .pyc may be that of a text of the same second and size
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except UserError:
        del sys.modules[name]
        raise
    return module
