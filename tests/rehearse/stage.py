"""A row of tests/plain, of wrong.py or right.py on the stage of launch/rehearse.py."""

import tempfile
from pathlib import Path

import program
from jobs import ROOT

from launch.rehearse import rehearse

LOOP = Path(__file__).with_name("loop.py")


class Rehearsed(program.Program):
    """A row says what is different, and as which family it must be told; none if it is right."""

    rows = []
    doors = "loop"


def command(row):
    if "loop" in row.doors:
        return [str(LOOP)]
    return [str(ROOT / row.script), *program.flags_of(row, row.flags)]


def rehearsed(kind):
    """({family: what is told}, notes, key) of a row."""
    program.now = row = kind()
    with tempfile.TemporaryDirectory() as folder:
        return rehearse(command(row), Path(folder), row.accept)


def wrong_with(row):
    """What is wrong with the verdict on a row, or ""."""
    alarms, notes, _ = rehearsed(row)
    family = row.family or "refused" * bool(row.refused)
    if family and family not in alarms or not family and alarms:
        return f"{row.__name__} is {family or 'right'}, and was told as {alarms}"
    if row.notes not in " ".join(notes):
        return f"{row.__name__} has no note {row.notes!r}: {notes}"
    return ""
