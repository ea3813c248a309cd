"""A crash loop ends the job: its agent would restart it for ever."""

from common.options import extra
from common.place import here


def refuse_a_crash_loop() -> None:
    """Exit with code 5 if three lives in a row have ended before they could train; call it first of all."""
    if here().restart >= 3:
        extra("crash_loop")()
