"""What launch/drill.py and launch/rehearse.py take: a command as one types it, behind their own options."""

import argparse


def read_command(doc, arguments, **options):
    """The arguments of such a tool: `command`, and `options`, {name: (default, help)}."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    if not args.command:
        parser.error("which command?")
    return args
