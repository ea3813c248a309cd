"""What launch/drill.py and launch/rehearse.py share: a command as one types it, behind their own options."""

import argparse

from common.extras.command import run_command

NPROC = "(--nproc(?:[-_]per[-_]node)?[=\0])[0-9]+"  # in a command whose words are joined by \0


def run_tool(tool, doc, arguments, **options):
    """Return the exit code of tool(args): `args.command`, and `options`, {name: (default, help)}."""
    return run_command(lambda: tool(read_command(doc, arguments, **options)))


def read_command(doc, arguments, **options):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    if not args.command:
        parser.error("which command?")
    return args
