"""Which process writes into which run folder: rank 0, and one rank of each node that has a folder of its own."""
import contextlib
import os
import time

import torch

from common import UserError
from common.fence import Fence, Shared
from common.files import room, sync_folder
from common.identity import check_identity, set_aside, trusted
from common.processes import agent_id

PATIENCE = 3.0           # seconds a network file system may take to show what another machine has made


def claim(opts, world, fingerprint, report):
    """The Fence of the folder this rank owns from now on, or None; call on every rank."""
    owned, agents = [], sorted({int(t) for t in world.all_gather(torch.tensor([agent_id()]))})

    def own():
        owned.append(_own(Fence(opts.run_dir, world.life, agents), opts, world, fingerprint, report))

    with world.together("owner"):
        if world.rank == 0:
            own()
    with world.together("owners"):              # a node that cannot see rank 0's staging has a folder of its own
        if world.local_rank == 0 and world.rank != 0 and not _appears(opts.run_dir / "checkpoints" / f".life-{world.life}"):
            own()
    return owned[0] if owned else None


def _own(fence, opts, world, fingerprint, report):
    run_dir = opts.run_dir
    try:
        _make(run_dir / "checkpoints")
        trusted(run_dir)
        trusted(run_dir / "checkpoints")
        fence.claim()
        if opts.resume == "none":
            if fence.fresh_job:
                set_aside(run_dir, report)
            else:
                report("--resume none: this is a restart of the same job, it goes on with its own checkpoints")
        check_identity(run_dir, opts, world, fingerprint, report)
        return fence
    except Shared:
        return None                                                 # rank 0's folder after all, on a slow file system
    except OSError as error:
        fence.release()
        raise UserError(f"--run-dir {room(error, error.filename or run_dir, 4096)}\n"
                        "choose a folder that can be written to") from error
    except UserError:
        fence.release()
        raise


def _make(folder):
    """A new folder is only on the disk once the one above it is synced."""
    new = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    for path in reversed(new):
        path.mkdir(mode=0o700, exist_ok=True)
        sync_folder(path.parent)
    os.listdir(folder)                                              # a file, or a folder that cannot be read: said now


def _appears(folder):
    deadline = time.monotonic() + PATIENCE
    while not os.path.isdir(folder):
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)                               # makes NFS look again
        time.sleep(0.05)
    return True
