"""The code of a run, known by its contents: the script, files that flags name, and what these import."""

import ast
import functools
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from common.errors import is_foreign
from common.options.options import Options
from common.options.registry import NAMES
from common.sealed import sha


@functools.cache
def bytes_of(path: Path) -> bytes:
    """Read a file. launch/torchrun.py reads it at its start, for all lives: an edit changes none of them."""
    return path.read_bytes()


def code_of(opts: Options) -> dict[str, str]:
    """Return {"code of FILE": hash} of the script, of files that flags name, and of what these import."""
    named = [str(getattr(opts, name)).rpartition(":")[0] for name in NAMES]
    code = {}
    for path in filter(Path.is_file, map(Path, (sys.argv[0], *named))):
        for file in files_of(path.resolve()):
            name = f"code of {file.name}"  # files of one name have one hash
            code[name] = sha(code.get(name, "").encode() + bytes_of(file))[:12]
    return code


def commit() -> str:
    """Name the commit in which the script is; nothing if it is in none."""
    command = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), "rev-parse", "-q", "--verify", "HEAD"]
    with suppress(OSError):  # there is no git
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def files_of(path: Path) -> dict[Path, Path]:
    """Return {file: the one that imports it}: a file, and all imports that lie in its folder."""
    found = {path: path}
    todo = [path]
    for importer in todo:  # it grows
        for name in sorted({*imports_of(importer)} - sys.stdlib_module_names):
            for own in modules(path.parent, name):
                if own not in found and not is_foreign(own):
                    found[own] = importer
                    todo.append(own)
    return found


def modules(folder, name):
    """List the files of a module in this folder, or of a package; none if Python takes a library's."""
    module = folder / f"{name}.py"
    if module.is_file():
        return [module]
    package = folder / name
    is_mere = package.is_dir() and not (package / "__init__.py").is_file()
    if is_mere and getattr(find_spec(name), "origin", None):
        return []
    return sorted(package.rglob("*.py"))


def imports_of(path):
    """Yield the first words of what a file imports, anywhere in it; nothing if Python cannot read it."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(bytes_of(path))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.partition(".")[0]
