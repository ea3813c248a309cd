"""Which code of a user's own was rehearsed, with which flags: an empty file in this person's cache."""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from common.options import Options
from common.place import cache_folder

OWN = "the script"  # the task of a loop of one's own


def code_of(opts: Options) -> str:
    """A hash of the script, the files that flags name, and what they import from their folders; or ""."""
    values = [str(value) for value in opts.to_json().values()]
    files = [Path(value.rpartition(":")[0]) for value in values if ".py:" in value]
    if opts.task == OWN:
        files.append(Path(getattr(sys.modules["__main__"], "__file__", "")))
    texts = {}
    while files:
        path = files.pop().resolve()
        if path.is_file() and path not in texts:
            texts[path] = path.read_bytes()
            for name in imports_of(path):
                files += [path.parent / f"{name}.py", path.parent / name / "__init__.py"]
    return hashlib.sha256(b"".join(sorted(texts.values()))).hexdigest() if texts else ""


def imports_of(path: Path) -> Iterator[str]:
    """The first words of what a file imports, anywhere in it."""
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def rehearsal_key(opts: Options) -> str:
    """Names this code and these flags; empty where all code is ours."""
    code = code_of(opts)
    text = json.dumps([code, opts.identity()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest() if code else ""


def note_rehearsal(key: str) -> None:
    """From now on nothing is said of a run with this key."""
    with suppress(OSError):
        folder = cache_folder() / "rehearsed"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / key).touch()


def was_rehearsed(opts: Options) -> bool:
    """Whether all code is ours, or was rehearsed with these flags."""
    key = rehearsal_key(opts)
    return not key or (cache_folder() / "rehearsed" / key).exists()
