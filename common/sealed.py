"""JSON that shows whether one bit of it has changed (a seal), and whether this user wrote it (a mark)."""

import hashlib
import hmac
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

Facts = dict[str, Any]  # ready for JSON
SEAL_BYTES = 78  # of the seal at the end of a file


def sha(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def to_json(value: object) -> bytes:
    """Return JSON as bytes, the same for equal objects. Without indent: Python's C encoder has none."""
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def finite(value: Any) -> Any:
    """Return the value as JSON can hold it: NaN and infinity become null."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def sealed(value: Facts) -> bytes:
    """Return the object as JSON that ends with the SHA-256 of all bytes before."""
    text = to_json(value).removesuffix(b"}\n")
    return text + _seal(text)


def unsealed(data: bytes) -> Facts:
    """Return the object that `sealed` wrote; ValueError if one bit has changed. Nothing is parsed before."""
    text = data[:-SEAL_BYTES]
    if text + _seal(text) != data:
        raise ValueError("it does not match its own seal")
    return json.loads(text + b"}")


def _seal(text):
    return f', "seal": "{sha(text)}"}}\n'.encode()


def marked(value: Facts) -> Facts:
    """Return the object with a mark that only this user can make."""
    return value | {"mark": hmac.new(own_key(), to_json(value), "sha256").hexdigest()}


def own_key() -> bytes:
    """Read 32 bytes that only this user can read, made where there are none; empty where none can be made."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    with suppress(OSError, RuntimeError):  # there is no home
        path = folder.expanduser() / "train_ddp/key"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():  # linked once it is whole: another process may read it at any time
            with tempfile.NamedTemporaryFile(dir=path.parent, buffering=0) as new, suppress(FileExistsError):
                new.write(os.urandom(32))
                os.link(new.name, path)
        return path.read_bytes()
    return b""
