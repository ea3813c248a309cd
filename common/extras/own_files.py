"""Functions in files of a user's own; whose files may be run at all; what a fork takes over (--fork RUN).

No torch here.
"""

import functools
import inspect
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType

from common.errors import UserError, blamed
from common.options import (
    FLAGS,
    OF_A_MACHINE,
    bytes_of,
    files_of,
    find_function,
    flag_of,
    read_options,
    read_run,
)
from common.sealed import marked, own_key

NOT_INHERITED = {"resume", "max_steps", "eval_only", "copy_to"}  # by a fork


def call_user(place, *arguments, first=False):
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
def load_file(path):
    """Import the module in a file, once in this process; it can import files of its own folder."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: it must not hide common or the standard library
    name = f"user_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    # its source: a cached .pyc may be that of a text of the same second and size
    try:
        exec(compile(bytes_of(path), path, "exec"), vars(module))
    finally:  # an import that fails may be one of them
        refuse_other_neighbours(path)
    return module


def refuse_other_neighbours(path):
    """Refuse a file if a module that it imports lies beside it, and another was taken for it."""
    for own, importer in files_of(path).items():
        name = own.parent.name if own.stem == "__init__" else own.stem
        taken = getattr(sys.modules.get(name), "__file__", None)
        beside = own == path.parent / f"{name}.py" or own == path.parent / name / "__init__.py"
        if own != path and beside and taken and own.resolve() != Path(taken).resolve():
            raise UserError(
                f"{importer} imports {name}, for which {taken} was taken\n"
                f"to have the one beside it, rename it, or use a Python that has imported no other {name}"
            )


def refuse_foreign_code(run_dir, flags):
    """Refuse these flags of a run if they name a file, unless this user has begun the run with it.

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


def is_marked(value):
    """Return whether this user has marked the object."""
    rest = {name: part for name, part in value.items() if name != "mark"}
    return own_key() != b"" and marked(rest) == value


def inherited_flags(given, script):
    """Add to the given flags those of this run's own earlier lives, or of the run that it leaves."""
    if "resume" in given or not {"fork", "at", "run_dir"} <= given.keys():
        raise UserError(
            "--fork needs --at and --run-dir, and no --resume\nwrite --fork RUN --at N --run-dir NEW"
        )
    source = given["run_dir"] if (given["run_dir"] / "options.json").is_file() else given["fork"]
    taken = {flag.name for flag in FLAGS.values() if script in flag.metadata["scripts"]} - NOT_INHERITED
    if not is_marked(read_run(source)):
        taken -= OF_A_MACHINE  # a stranger's run asks for no downloads here
    flags = {}
    for name, value in read_options(source).items():
        if name in taken - given.keys():
            flags[name] = tuple(value) if isinstance(value, list) else value
    refuse_foreign_code(source, flags)
    return flags | given
