"""A flag: the values it takes, the scripts that have it, and the parser that reports mistakes."""
import argparse
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from common.errors import UserError, did_you_mean, say, speaks_for_node

NUMBERS = {int: "a whole number", float: "a number"}
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def free(default, text, group="", scripts="ddp dp mp", low=0, below=math.inf, choices=(), fixed=False):
    """A field of Options: a flag that may change between restarts; `group` opens a group of --help."""
    return dataclasses.field(default=default, metadata={
        "help": text, "group": group, "scripts": scripts.split(), "low": low, "below": below,
        "choices": choices, "fixed": fixed})


def fixed(*args, **kwargs):
    """Like `free`, for a flag that changes the result: a restart with another value is refused."""
    return free(*args, **kwargs, fixed=True)


def flag_of(name: str) -> str:
    return "--no-tensorboard" if name == "tensorboard" else "--" + name.replace("_", "-")


def value_of(field: dataclasses.Field, text: str) -> Any:
    """The value that a flag's text stands for; ValueError in words."""
    if field.type in NUMBERS:
        return _number(field, text)
    if not text:
        raise ValueError("is empty")
    choices = field.metadata["choices"]
    if choices and text not in choices and not ("FILE.py:f" in choices and ".py:" in text):
        raise ValueError(f"{text!r} is none of {', '.join(choices)}{did_you_mean(text, choices)}")
    if field.name == "devices":
        return _devices(text)
    if field.type is tuple:
        return tuple(text.split(","))
    if field.name == "optimizer" and ".py" not in text:
        return text.lower()
    return Path(text) if field.type is Path else text


def _number(field, text):
    low = field.metadata["low"]
    below = field.metadata["below"]
    try:
        value = field.type(text)
    except ValueError:
        value = math.nan
    if low <= value < below:
        return value
    bound = f" and below {below:g}" if below < math.inf else ""
    raise ValueError(f"{text!r} is not {NUMBERS[field.type]} from {low}{bound}")


def _devices(text):
    names = text.split(",")
    if not all(map(DEVICE.fullmatch, names)):
        raise ValueError(f"{text!r} is not a list of devices like cuda:0,cuda:1 or cpu,cpu")
    return tuple("cuda:0" if name == "cuda" else name for name in names)


def reader(field: dataclasses.Field) -> Callable[[str], Any]:
    """`value_of`, as argparse calls it."""
    def read(text):
        try:
            return value_of(field, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return read


def shape(field):
    """What --help shows for the value."""
    choices = field.metadata["choices"]
    if choices:
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "X", Path: "PATH", tuple: "A,B"}.get(field.type, "NAME")


class Parser(argparse.ArgumentParser):
    """--help begins with the script's own commands; every mistake is a UserError."""

    def __init__(self, doc: str | None, script: str, options: list[dataclasses.Field]) -> None:
        super().__init__(prog=f"train_{script}.py", description=doc, usage=argparse.SUPPRESS,
                         allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=lambda prog:
                         argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=120))
        self.owners = {flag_of(field.name): field.metadata["scripts"] for field in options}
        self.mine = [flag for flag, scripts in self.owners.items() if script in scripts]
        for field in options:
            if field.metadata["group"]:
                group = self.add_argument_group(field.metadata["group"])
            flag = flag_of(field.name)
            if flag not in self.mine:
                continue
            text = field.metadata["help"]
            if field.type is bool:
                action = "store_false" if field.default else "store_true"
                group.add_argument(flag, dest=field.name, action=action, help=text)
                continue
            if field.default not in (None, "", ()):
                text += f" (default: {field.default})"
            group.add_argument(flag, dest=field.name, type=reader(field), metavar=shape(field), help=text)

    def read(self, argv: list[str]) -> dict[str, Any]:
        """{field: value} of the flags in argv; --a_b counts as --a-b."""
        words: list[str] = []
        for text in argv:
            if re.match("-[^-h]", text) and words and re.fullmatch("--[^=]+", words[-1]):
                words[-1] += f"={text}"  # argparse would take the value of `--best -loss` for a flag
            else:
                words.append(re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), text))
        given, unknown = self.parse_known_args(words)
        if not unknown:
            return vars(given)
        flag = unknown[0].partition("=")[0]
        if flag in self.owners:
            owners = " and ".join(f"train_{script}.py" for script in self.owners[flag])
            raise UserError(f"{flag} cannot take effect in {self.prog}\nit belongs to {owners}")
        self.error(f"unknown argument {unknown[0]!r}{did_you_mean(flag, self.mine)}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}\nsee {self.prog} --help")

    def print_help(self, file=None):
        if speaks_for_node():
            say(self.format_help())
