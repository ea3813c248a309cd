"""A row of tests/plain, of wrong.py or right.py on the stage of launch/rehearse.py."""

import contextlib
import io
import tempfile
from pathlib import Path

import program
from jobs import ROOT

from common.errors import UserError
from launch.rehearse import FAMILIES, rehearse

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
    """(as which family a row is told, all that is told)"""
    program.now = row = kind()
    told = io.StringIO()
    family = ""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(told):
        try:
            rehearse(command(row), Path(folder), row.accept)
        except UserError as error:
            print(error)
            starts = [
                name for name, text in FAMILIES.items() if str(error).startswith(text.partition("{")[0])
            ]
            (family,) = starts or ["refused"]
    return family, told.getvalue()


def wrong_with(row):
    """What is wrong with the verdict on a row, or ""."""
    family, told = rehearsed(row)
    wanted = row.family or "refused" * bool(row.refused)
    if family != wanted or row.notes not in told:
        return f"{row.__name__} is {wanted or 'right'} {row.notes}, and was told as {family}: {told}"
    return ""
