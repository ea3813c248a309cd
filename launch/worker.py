"""What a process of a training does. multiprocessing's fork server imports this, and the training, once."""

import atexit
import importlib
import json
import os
import re
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import torch

ROOT = str(Path(__file__).resolve().parents[1])
# not the folder where it was started (""): that may have a `common` of its own
sys.path = [ROOT, *filter(None, sys.path)]

from common import place  # noqa: E402
from common.errors import guarded, one_line, say  # noqa: E402
from common.options import bytes_of, extra  # noqa: E402

A_PEER = re.compile("Connection (closed|reset)|Dist(Network|Store)Error")  # has ended while the ranks met


def preload(script: str, module: str, options: dict) -> None:
    """Read a user's files, import the training, draw its data: each process then begins with all three.

    Nothing here may start a thread, which a fork would lack, or touch a GPU, which a fork could not use.
    """
    for name in (f"{script}:", *options.values()):
        file, _, _ = str(name).rpartition(":")
        if file.endswith(".py"):
            bytes_of(Path(file).resolve())
    importlib.import_module(module)
    extra("own_data")  # of this project as it is now: a change of it changes nothing until the next start
    importlib.import_module("torch._dynamo")  # torch.optim would import it in each process: two seconds
    if options:
        from common.extras.datasets import preload as open_data
        from common.options import Options

        opts = Options(**options)
        open_data(opts)
        if opts.tensorboard:
            importlib.import_module("torch.utils.tensorboard")  # at the end: it may not be installed


def work(command: tuple[str, ...], environment: dict[str, str], outputs: list[str]) -> None:
    """Do what `python -u COMMAND` does, with files in place of stdout and stderr if any are named."""
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
            with open(path, "wb") as file:
                os.dup2(file.fileno(), number)
    # Forks have the same generators; data drawn without a seed must differ, or no rank sees the mistake.
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.path.insert(0, str(Path(command[0]).resolve().parent))  # as python does
    sys.argv = [*command]
    try:
        # a mistake in a script of one's own is made again by each life
        with guarded(debug="--debug" in command):
            code = compile(bytes_of(Path(command[0]).resolve()), command[0], "exec")
            main = sys.modules["__main__"] = ModuleType("__main__")
            main.__file__ = command[0]
            exec(code, vars(main))
    except RuntimeError as error:
        if not A_PEER.search(f"{type(error).__name__} {error}") or "--debug" in command:
            raise
        say(f"rank {place.here().rank}: another one has gone ({one_line(error)})", sys.stderr)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


if "LAUNCH_PRELOAD" in os.environ:  # in the fork server
    place.die_with_the_parent()  # an import may hang
    with suppress(Exception):  # each process meets the same error and prints it
        preload(*json.loads(os.environ.pop("LAUNCH_PRELOAD")))
