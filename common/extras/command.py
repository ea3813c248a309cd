"""How a command ends, that is no training: its exit code, and its errors in three lines. No torch here."""

import argparse
import signal
import sys

from common.errors import Outlet, guarded, ready_streams


def parser_of(name, doc):
    """Return a parser whose help is the docstring of the command."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(name, description=doc, allow_abbrev=False, formatter_class=raw)


def run_command(act, what="cannot be done"):
    """Return the exit code of a command: what `act` returns, or that of its error, which is printed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes what is temporary
    ready_streams()
    try:
        with guarded(what):
            return act()
    except BrokenPipeError:  # `| head` has seen enough
        Outlet(sys.stdout).write()
        return 141
    except SystemExit as exit:
        return int(exit.code or 0)
