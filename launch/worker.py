"""What a process of a training does. multiprocessing's fork server imports this, and the training, once."""

import atexit
import importlib
import json
import os
import re
import runpy
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import torch

ROOT = str(Path(__file__).resolve().parents[1])
# not the folder where it was started (""): that may have a `common` of its own
sys.path = [ROOT, *filter(None, sys.path)]

from common import place  # noqa: E402
from common.errors import guarded, one_line, say  # noqa: E402

A_PEER = re.compile("Connection (closed|reset)|Dist(Network|Store)Error")  # has ended while the ranks met


def preload(module: str, options: dict) -> None:
    """Imports the training and draws its data: each process then begins with both.

    Nothing here may start a thread, which a fork would lack, or touch a GPU, which a fork could not use.
    """
    importlib.import_module(module)
    importlib.import_module("torch._dynamo")  # torch.optim would import it in each process: two seconds
    if options:
        from common.data import preload as open_data
        from common.options import Options

        opts = Options(**options)
        open_data(opts)
        if opts.tensorboard:
            importlib.import_module("torch.utils.tensorboard")  # at the end: it may not be installed


def work(command: tuple[str, ...], environment: dict[str, str], outputs: list[str]) -> None:
    """Does what `python -u COMMAND` does, with files in place of stdout and stderr if any are named."""
    os.setsid()  # Ctrl-C reaches the agent, and through it the processes
    os.environ.update(environment)
    # else the fork server, whose death ends this process, would outlive a killed agent
    lifeline = forkserver._forkserver._forkserver_alive_fd
    if lifeline is not None:
        os.close(lifeline)
    place.die_with_the_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    for number, path in enumerate(outputs, 1):
        if path:
            os.dup2(open(path, "wb").fileno(), number)
    # Forks have the same generators; data drawn without a seed must differ, or no rank sees the mistake.
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.path.insert(0, str(Path(command[0]).resolve().parent))  # as python does
    sys.argv = [*command]
    try:
        # a mistake in a script of one's own is made again by each life
        with guarded(debug="--debug" in command):
            runpy.run_path(command[0], run_name="__main__")
    except RuntimeError as error:
        if not A_PEER.search(f"{type(error).__name__} {error}") or "--debug" in command:
            raise
        say(f"rank {os.environ['RANK']}: another one has gone ({one_line(error)})", sys.stderr)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


with suppress(
    Exception
):  # each process meets the same error and prints it; other programs have no such variable
    preload(*json.loads(os.environ.pop("LAUNCH_PRELOAD")))
