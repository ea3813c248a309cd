"""From a command line to checked Options, in every process; mistakes are told once per machine.

The words become values of fields (`Parser`), with --fork also those of the other run. Then names, flags
together and with the number of processes, the folder and an earlier start of this run are checked.
"""

import argparse
import functools
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

from common.errors import UserError, end, ready_streams, say
from common.options.options import FLAGS, Options, Values, read_options
from common.options.registry import NAMES, extra, kind_of
from common.place import die_with_the_parent, here, note_start, tasks_beside
from common.torch_names import TRAINING, missing

SCRIPTS = {"train_dp.py": "dp", "train_mp.py": "mp"}  # any other is as train_ddp.py
# flags that no rule is about
FIRST_RUN = {"run_dir", "model", "dataset", "epochs", "max_steps", "seed", "eval_every"}
FAILED_LIVES = 3  # in a row, which could not train: an agent would restart them for ever
NUMBERS = {int: "a whole number", float: "a number"}
SHAPES: dict[object, str] = {int: "N", float: "X", tuple: "A,B"}  # of a value, in --help


class Parser(argparse.ArgumentParser):
    """Every mistake is a UserError."""

    def error(self, message):
        raise UserError(f"{message.removeprefix('argument ')}\nsee {self.prog} --help")


def read_flags(words, doc, script):
    """Return {field: value} of the flags among the words; --help prints `doc`, then the flags."""
    parser = Parser(
        prog=f"train_{script}.py",
        description=doc,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=34, width=120
        ),
    )
    for flag, field in FLAGS.items():
        if field.metadata["group"]:
            group = parser.add_argument_group(field.metadata["group"])
        if script in field.metadata["scripts"]:
            group.add_argument(flag, dest=field.name, **how_to_read(field))
    values, unknown = parser.parse_known_args(as_argparse_reads(words))
    if unknown:
        extra("unknown_flag")(unknown[0], parser.prog)
    return vars(values)


def as_argparse_reads(words):
    """Return the same words: --a_b as --a-b; `--best -loss`, whose value looks like a flag, as one word."""
    same = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            same.append(flag.replace("_", "-") + equals + value)
        elif word.startswith("-") and word != "-h" and same and "=" not in same[-1]:
            same[-1] += f"={word}"  # a value
        else:
            same.append(word)
    return same


def how_to_read(field):
    """Return the arguments of add_argument for a flag."""
    text = field.metadata["text"]
    if field.type is bool:
        return {"action": "store_false" if field.default else "store_true", "help": text}
    if field.default not in (None, "", ()):
        text += f" (default: {field.default})"
    return {
        "type": functools.partial(read_value, field),
        "choices": field.metadata["choices"],
        "metavar": SHAPES.get(field.type),
        "help": text,
    }


def read_value(field, text):
    """Read the value that a person wrote."""
    if field.type in NUMBERS:
        low = field.metadata["low"]
        below = field.metadata["below"]
        with suppress(ValueError):
            value = field.type(text)
            if low <= value < below:
                return value
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {NUMBERS[field.type]} from {low} and below {below:g}"
        )
    if "" in (text.split(",") if field.type is tuple else [text]):
        raise argparse.ArgumentTypeError(f"{text!r} is empty, or a part of it")
    if field.name == "optimizer" and ".py" not in text:
        return text.lower()
    return tuple(text.split(",")) if field.type is tuple else field.type(text)


def begin_life(trains: bool = True) -> None:
    """Call first in every process; UserError if it cannot meet others. A launcher does not train itself."""
    ready_streams()
    place = here()
    siblings = tasks_beside() if trains else ""
    if siblings or not place.can_meet:
        extra("no_meeting")(siblings)
    if place.agent:
        die_with_the_parent()
    refuse_a_crash_loop()
    note_start()


def refuse_a_crash_loop():
    """Exit with code 5 if three lives in a row have ended before they could train.

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


def parse_options(
    doc: str | None, argv: list[str] | None = None, script: str | None = None, processes: int | None = None
) -> Options:
    """Check the options of this process; a mistake ends it with exit code 2, printed once per machine.

    A launcher checks them for its workers: then `processes` is their number, or 0 if it is not known yet.
    """
    if argv is None and processes is None:
        gc.disable()  # until `join`: imports make no garbage, and the search for it is a fifth of their time
    try:
        begin_life(trains=processes is None)
        script = script or SCRIPTS.get(Path(sys.argv[0]).name, "ddp")
        given = read_flags(sys.argv[1:] if argv is None else argv, doc, script)
        if {"fork", "at"} & given.keys():
            given = extra("fork")(given, script)
        opts = Options(script=script, **given)
        check_names(opts)
        world = here().size if processes is None else processes
        if script != "ddp" or given.keys() - FIRST_RUN:
            extra("rules")(opts, world)
        check_folder(opts)
        wrong = []
        with suppress(OSError, UserError):  # of what cannot be read the store tells
            if opts.is_bound:
                wrong = opts.compare(read_options(opts.run_dir))
        opts.refuse_another_run(wrong)
        if argv is None and here().rank == 0 and not here().launched:  # its launcher has printed it
            say(f"{opts.run_dir}: starting; importing torch takes some seconds")
        if processes is None:
            _check_torch()
    except UserError as error:
        end(error, shared=True)
    return opts


def check_names(opts):
    """Refuse a name that does not exist, before torch is imported."""
    for option, known in NAMES.items():
        name = getattr(opts, option)
        if ".py" in name or known and kind_of(name) not in known:
            extra("name")(option, name, known)


def check_folder(opts):
    """Refuse a folder that is not there or not safe, before torch is imported."""
    place = next(path for path in (opts.run_dir, *opts.run_dir.parents) if os.path.lexists(path))
    if not os.access(os.path.join(place, ""), os.W_OK | os.X_OK):
        raise UserError(
            f"--run-dir: {str(place)!r} is not a folder that can be written to\n"
            "give the run a folder of its own"
        )
    if place == opts.run_dir and place.stat().st_mode & 0o002:
        raise UserError(f"--run-dir: anybody may write into {str(place)!r}\nchmod o-w {place}")


def read_arguments(words: list[str], own: Values) -> Options:
    """Check the options of a script of one's own, which has `own` in place of more flags."""
    opts = Options(**read_flags(words, None, "ddp") | own)
    extra("rules_of_arguments")(opts, here().size)
    check_folder(opts)
    _check_torch()
    return opts


def _check_torch():
    """Refuse a torch that lacks a name of its inside that is used here."""
    lack = missing(TRAINING)
    if lack:
        raise UserError(lack)
