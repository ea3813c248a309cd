"""From a command line to checked Options, in every process; mistakes are told once per machine.

The words become values of fields (`Parser`), with --fork also those of the other run. Then names, flags
together, files, an earlier start of this run and the number of processes are checked, in this order.
"""

import argparse
import functools
import gc
import sys
from contextlib import suppress
from pathlib import Path

from common.errors import UserError, did_you_mean, end, ready_streams, say
from common.options.options import FLAGS, OF_A_MACHINE, Options, Values, read_options, read_run
from common.options.rules import check_clashes, check_files, check_names, check_together, check_world, flag_of
from common.options.user import refuse_foreign_code
from common.place import die_with_the_parent, here, meeting_variables, note_that_it_waits
from common.sealed import is_marked

SCRIPTS = {"train_dp.py": "dp", "train_mp.py": "mp"}  # any other is as train_ddp.py
NUMBERS = {int: "a whole number", float: "a number"}
SHAPES: dict[object, str] = {int: "N", float: "X", tuple: "A,B"}  # of a value, in --help
MEANT = {  # by flags that others have
    "--batch-size": "--global-batch-size, the samples of a step over all processes",
    "--learning-rate": "--lr",
    "--precision": "--amp bf16",
    "--gpus": "torchrun --nproc_per_node=N, which starts a process for each GPU",
    "--nproc": "torchrun --nproc_per_node=N, before the name of the script",
}
NOT_INHERITED = {"resume", "max_steps", "eval_only"}  # by a --fork


class Parser(argparse.ArgumentParser):
    """Every mistake is a UserError."""

    def error(self, message):
        raise UserError(f"{message.removeprefix('argument ')}\nsee {self.prog} --help")


def read_flags(words, doc, script):
    """{field: value} of the flags among the words; --help prints `doc`, then the flags."""
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
    if not unknown:
        return vars(values)
    flag = unknown[0].partition("=")[0]
    if flag in FLAGS:
        owners = " and ".join(f"train_{script}.py" for script in FLAGS[flag].metadata["scripts"])
        raise UserError(f"{flag} cannot take effect in {parser.prog}\nit belongs to {owners}")
    hint = f"; did you mean {MEANT[flag]}?" if flag in MEANT else did_you_mean(flag, FLAGS)
    parser.error(f"unknown argument {unknown[0]!r}{hint}")


def as_argparse_reads(words):
    """The same words: --a_b as --a-b, and `--best -loss`, whose value looks like a flag, as one word."""
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
    """What argparse is told of a flag."""
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
    """The value that a person wrote."""
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
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    if field.name == "optimizer" and ".py" not in text:
        return text.lower()
    return tuple(text.split(",")) if field.type is tuple else field.type(text)


def begin_life() -> None:
    """Call first in every process; UserError if it cannot meet others."""
    ready_streams()
    place = here()
    if not place.can_meet:
        raise UserError(
            f"ranks cannot meet with {meeting_variables()}\n"
            "start with torchrun, or set RANK (0 to WORLD_SIZE - 1), WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    if place.agent:
        die_with_the_parent()
    note_that_it_waits(True)


def parse_options(
    doc: str | None, argv: list[str] | None = None, script: str | None = None, processes: int | None = None
) -> Options:
    """The checked options of this process; a mistake ends it with exit code 2, printed once per machine.

    A launcher checks them for its workers: then `processes` is their number, or 0 if it is not known yet.
    """
    if argv is None and processes is None:
        gc.disable()  # until `join`: imports make no garbage, and the search for it is a fifth of their time
    try:
        begin_life()
        script = script or SCRIPTS.get(Path(sys.argv[0]).name, "ddp")
        given = read_flags(sys.argv[1:] if argv is None else argv, doc, script)
        opts = Options(script=script, **_inherited(given, script))
        check_names(opts)
        check_together(opts)
        check_files(opts)
        wrong = []
        with suppress(OSError, UserError):  # of what cannot be read the store tells
            if opts.is_bound:
                wrong = opts.compare(read_options(opts.run_dir))
        opts.refuse_another_run(wrong)
        world = here().size if processes is None else processes
        if world:
            check_world(opts, world)
    except UserError as error:
        end(error, shared=True)
    if argv is None and here().rank == 0 and not here().launched:  # its launcher has printed it
        say(f"{opts.run_dir}: starting; importing torch takes some seconds")
    return opts


def read_arguments(given: Values, own: Values) -> Options:
    """The options of a script of one's own: those `given` are read as flags are."""
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words += [flag_of(name)] * (value != getattr(Options, name))
        elif value is not None:
            words.append(f"{flag_of(name)}={value}")
    opts = Options(**read_flags(words, None, "ddp") | own)
    check_clashes(opts)
    check_files(opts)
    check_world(opts, here().size)
    return opts


def _inherited(given, script):
    """With --fork: also the flags of this run's own earlier lives, or of the run that it leaves."""
    if not {"fork", "at"} & given.keys():
        return given
    if "resume" in given or not {"fork", "at", "run_dir"} <= given.keys():
        raise UserError(
            "--fork needs --at and --run-dir, and no --resume\nwrite --fork RUN --at N --run-dir NEW"
        )
    source = given["run_dir"] if (given["run_dir"] / "options.json").is_file() else given["fork"]
    taken = {flag.name for flag in FLAGS.values() if script in flag.metadata["scripts"]} - NOT_INHERITED
    if not is_marked(read_run(source)):
        taken -= OF_A_MACHINE  # a stranger's run asks for no downloads here
    flags = {}
    for name, value in read_options(source).items():
        if name in taken - given.keys():
            flags[name] = tuple(value) if isinstance(value, list) else value
    refuse_foreign_code(source, flags)
    return flags | given
