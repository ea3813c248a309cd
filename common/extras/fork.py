"""A run that shares its first steps with another one (--fork RUN --at STEP), and its flags. No torch here."""

from common.errors import UserError
from common.extras.own_files import is_marked, refuse_foreign_code
from common.options import FLAGS, OF_A_MACHINE, read_options, read_run

NOT_INHERITED = {"resume", "max_steps", "eval_only"}


def inherited(given, script):
    """Add to the given flags those of this run's own earlier lives, or of the run that it leaves."""
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
