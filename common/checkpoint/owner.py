"""Which process owns which run folder: rank 0, and one rank of each node that has a folder of its own."""
import os

import torch

from common.checkpoint.fence import Fence
from common.checkpoint.files import room, sync_folder
from common.checkpoint.identity import check_identity, refuse_an_idle_resume, set_aside, trusted
from common.errors import UserError
from common.options import agent_id


def claim(opts, world, parts, fingerprint, report):
    """The Fence of the folder this rank owns from now on, or None; call on every rank."""
    owned, agents = None, sorted({int(t) for t in world.all_gather(torch.tensor([agent_id()]))})
    fence = Fence(opts.run_dir, world.life, agents)
    with world.all_or_none("owner"):
        if world.rank == 0:
            owned = _own(fence, opts, world, parts, fingerprint, report)
    with world.all_or_none("owners"):  # the first rank of each node: rank 0's folder, or one of its own?
        if world.local_rank == 0 and world.rank != 0:
            owned = _own(fence, opts, world, parts, fingerprint, report)
    return owned


def _own(fence, opts, world, parts, fingerprint, report):
    run_dir = opts.run_dir
    try:
        _make(run_dir / "checkpoints")
        if world.rank and not fence.elect():
            return fence.attend(world.rank)
        if world.rank and parts > 1:
            raise UserError(f"--run-dir {run_dir}: rank {world.rank} does not see the folder of rank 0\n"
                            "a net in stages over machines needs one run folder that all of them share")
        trusted(run_dir)
        trusted(run_dir / "checkpoints")
        fence.claim(report)
        afresh = set_aside(run_dir, opts.resume == "none", fence.fresh_job, report)
        if fence.fresh_job:
            refuse_an_idle_resume(run_dir, opts.resume)
        fence.begin(afresh)
        if check_identity(run_dir, opts, world, fingerprint, report):
            fence.begin(afresh=True)
        return fence
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
    os.listdir(folder)  # raises if it is a file or cannot be read
