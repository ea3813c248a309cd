"""A user's own code: the function in `path/to/file.py:function`; its errors name file and line."""
import importlib.util
import inspect
import sys
import zlib
from pathlib import Path
from typing import Any

from common.errors import UserError, blamed


def find_user(spec: str, *default: Any) -> Any:
    """The function that `path/to/file.py:function` names; `default`, if one is given and there is none."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UserError(f"{spec!r} names no function\nwrite path/to/file.py:function")
    if not Path(path).is_file():
        raise UserError(f"{path} does not exist\ngive the path of the file that has {name}")
    module = load_file(path)
    function = getattr(module, name, *(default or [None]))
    if callable(function) or default:
        return function
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise UserError(f"{path} has no function {name}\nit has {', '.join(own[:12]) or 'none'}")


def call_user(spec: str, *facts: Any, first: bool = False) -> Any:
    """Calls the function in `path/to/file.py:function` with the last of `facts`, as many as it requires.

    Parameters with a default keep it: `f()`, `f(data)` and `f(opts, data, width=3)` can all build a model.
    With `first` it gets the first of them.
    """
    function = find_user(spec)
    with blamed(spec):
        required = [p for p in inspect.signature(function).parameters.values()
                    if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(required) > len(facts):
            raise UserError(f"{spec} takes {len(required)} arguments, but gets {len(facts)}\n"
                            "give the others a default")
        count = len(required)
        return function(*(facts[:count] if first else facts[len(facts) - count:]))


def load_file(path):
    """The module in a file, loaded once in this process; it can import files of its own folder."""
    path = str(Path(path).resolve())
    name = f"user_{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(Path(path).parent) not in sys.path:
        sys.path.append(str(Path(path).parent))  # last: it must not hide common or the standard library
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with blamed(path):  # its source: a cached .pyc may be that of a text of the same second and size
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except UserError:
        del sys.modules[name]
        raise
    return module
