"""What a child process does on a GPU for the tests of this folder: python tests/gpu/checks.py NAME ..."""

import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.append(f"{sys.path[0]}/tests/tools")
import torch
from torch import nn

from common.options import parse_options
from common.training import TrainState
from common.training import state as training_state


def stuck_stream(*flags):
    """At step 20 the default stream comes to a kernel without end, as behind a dead peer's collective."""
    import train_ddp

    whole = TrainState.finish_gradient

    def finish(self, size):
        if self.progress.step == 20:
            print(f"{time.time():.2f} the stream is blocked", flush=True)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                torch.cuda._sleep(2**40)  # about ten minutes
            torch.cuda.current_stream().wait_stream(side)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()  # the agent's
            threading.Timer(31, os._exit, (9,)).start()  # and its SIGKILL
        whole(self, size)

    TrainState.finish_gradient = finish
    training_state.has_peers = lambda: True
    train_ddp.main(parse_options("", list(flags), script="ddp"))


def late_copy(device="cuda:0"):
    """A save that is still copied when an evaluation puts the averages into the net: it has the weights."""
    from stores import a_life, options, world_of_one

    width = 4096 if device != "cpu" else 64
    world = replace(world_of_one(), devices=(torch.device(device),))
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(16))).to(device)
    with (
        tempfile.TemporaryDirectory() as folder,
        a_life(options(Path(folder), ema_decay=0.5), net, world=world) as life,
    ):
        store = life.store
        state = life.state
        for _ in range(2):
            net(torch.ones(8, width, device=device)).square().mean().backward()
            state.update(8)
        wanted = {name: p.detach().clone() for name, p in net.named_parameters()}
        store.save()
        with torch.no_grad(), state.evaluating():
            pass
        store.saver.wait()
        views = store.saver.images["model"].views
        print("differ:", sum(not torch.equal(views[name], p.cpu()) for name, p in wanted.items()))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
