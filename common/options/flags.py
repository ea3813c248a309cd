"""A flag: the values it takes, the scripts that have it, and the parser that reports mistakes."""
import argparse
import math
import re
from dataclasses import field

from common.errors import UserError, did_you_mean, say, speaks_for_node
from common.options.optimizers import keywords

SWITCH = None      # the kind of a flag without a value


def free(default, kind, text, group="", scripts="ddp dp mp", fixed=False):
    """A field of Options: a flag that may change between restarts; `group` opens a group of --help."""
    return field(default=default, metadata={
        "kind": kind, "help": text, "group": group, "scripts": scripts.split(), "fixed": fixed})


def fixed(*args, **kwargs):
    """Like `free`, for a flag that changes the result: a restart with another value is refused."""
    return free(*args, **kwargs, fixed=True)


def flag_of(name):
    return "--no-tensorboard" if name == "tensorboard" else "--" + name.replace("_", "-")


# ---- kinds of values: functions from a flag's text to its value ------------------------------------
def _kind(shape, convert):
    def kind(text):
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
    kind.shape = shape
    return kind


def whole(low, high=10**9):
    def convert(text):
        if not re.fullmatch(r"[+-]?[0-9]{1,30}", text) or not low <= int(text) <= high:
            raise ValueError(f"is not a whole number from {low} to {high}")
        return int(text)
    return _kind("N", convert)


def real(below=math.inf, above=False):
    def convert(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < below or (above and value == 0):  # nan fails every comparison
            bound = "" if below == math.inf else f" and < {below:g}"
            raise ValueError(f"is not a finite number {'>' if above else '>='} 0{bound}")
        return value
    return _kind("X", convert)


def one_of(*names, or_function=False):
    """One of these names, or `path/to/file.py:function`."""
    def convert(text):
        if text not in names and not (or_function and ".py:" in text):
            raise ValueError(f"is none of {', '.join(names)}{did_you_mean(text, names)}")
        return text
    return _kind("{" + ",".join([*names, *["FILE.py:f"] * or_function]) + "}", convert)


def _plain(text):
    """A name: it ends up in paths, log lines and JSON, so it may only have characters that those can hold."""
    if not text or any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in text):
        raise ValueError("is empty, holds a control character or is not UTF-8; use another name")
    return text


def _devices(text):
    if not re.fullmatch(r"(cpu|cuda(:\d{1,4})?)(,(cpu|cuda(:\d{1,4})?))*", text):
        raise ValueError("is not a list of devices like cuda:0,cuda:1 or cpu,cpu")
    return tuple("cuda:0" if name == "cuda" else name for name in text.split(","))


def _betas(text):
    values = tuple(real(below=1)(part) for part in text.split(","))
    if len(values) != 2:
        raise ValueError("is not two numbers like 0.9,0.95")
    return values


def _arguments(text):
    keywords(text)
    return text


def _balance(text):
    if not re.fullmatch(r"parameters|time|[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        near = did_you_mean(text, ("parameters", "time"))
        raise ValueError(f"is not parameters, time or a list of counts like 3,1{near}")
    return text


NAME, PATH = _kind("NAME", _plain), _kind("PATH", _plain)
NAMES = _kind("NAME,NAME", lambda text: tuple(map(_plain, text.split(","))))
DEVICES, CUTS = _kind("D,D", _devices), _kind("HOW", _balance)
BETAS, ARGUMENTS = _kind("X,Y", _betas), _kind("A=V,A=V", _arguments)
OPTIMIZER = _kind("NAME", lambda text: _plain(text if ".py" in text else text.lower()))


# ---- the parser -----------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """--help begins with the script's own commands; every mistake is a UserError."""

    def __init__(self, doc, script, options):
        super().__init__(prog=f"train_{script}.py", description=doc, usage=argparse.SUPPRESS,
                         allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=lambda prog:
                         argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=120))
        self.script, self.owners = script, {flag_of(f.name): f.metadata["scripts"] for f in options}
        for f in options:
            kind, text = f.metadata["kind"], f.metadata["help"]
            if f.metadata["group"]:
                group = self.add_argument_group(f.metadata["group"])
            if script not in f.metadata["scripts"]:
                continue
            if kind is SWITCH:
                how = {"action": "store_false" if f.default else "store_true", "help": text}
            else:
                shown = "" if f.default in (None, "", ()) else f" (default: {f.default})"
                how = {"type": kind, "metavar": kind.shape, "help": text + shown}
            group.add_argument(flag_of(f.name), dest=f.name, **how)

    def read(self, argv):
        """{field: value} of the flags in argv; --a_b counts as --a-b."""
        words: list[str] = []
        for text in argv:
            if re.match("-[^-]", text) and text != "-h" and words and re.fullmatch("--[^=]+", words[-1]):
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
        mine = [name for name, scripts in self.owners.items() if self.script in scripts]
        self.error(f"unknown argument {unknown[0]!r}{did_you_mean(flag, mine)}")

    def error(self, message):
        raise UserError(f"{message.removeprefix('argument ')}\nsee {self.prog} --help")

    def print_help(self, file=None):
        if speaks_for_node():
            say(self.format_help())
