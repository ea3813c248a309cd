"""What a person is told when something cannot be: three lines at most, and an exit code."""

import contextlib

import pytest

from common.errors import UserError


@contextlib.contextmanager
def refusal(words=None, code=2):
    """What is done inside is refused with these words, a regular expression."""
    with pytest.raises(UserError, match=words) as told:
        yield told
    assert told.value.code == code and len(str(told.value).splitlines()) <= 3, told.value
