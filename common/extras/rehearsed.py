"""Which code of a user's own was rehearsed, with which flags: an empty file in this person's cache."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from common.options import code_of


def rehearsal_key(opts):
    """Name this code and these flags."""
    text = json.dumps([code_of(opts), opts.identity()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def note_rehearsal(key):
    """Say nothing more of a run with this key from now on."""
    with suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / key).touch()


def was_rehearsed(opts):
    """Return whether this code was rehearsed with these flags."""
    with suppress(OSError, RuntimeError):  # there is no home, or it is another user's
        return (_folder() / rehearsal_key(opts)).exists()
    return False


def _folder():
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "train_ddp/rehearsed")
