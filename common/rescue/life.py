"""A crash loop ends the job: its agent would restart it for ever."""

from common.errors import UserError
from common.place import here

FAILED_LIVES = 3  # in a row, which could not train


def refuse_a_crash_loop() -> None:
    """Exit with code 5 if three lives in a row have ended before they could train; call it first of all.

    The agent counts the restarts, and its folder says which of them began and did not train (`note_start` in
    place.py): each machine judges its own lives.
    """
    place = here()
    lives = range(place.restart - FAILED_LIVES, place.restart)
    if place.notes and all((place.notes / f"start-{life}-0").exists() for life in lives):
        raise UserError(
            f"{FAILED_LIVES} lives in a row ended before they could train; their errors are above\n"
            "mend the cause, then start again",
            code=5,
        )
