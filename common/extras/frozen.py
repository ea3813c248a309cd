"""Weights that do not train: they have a file of their own, and each checkpoint a link to the same one."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from common.checkpoint import Damaged, Layout, checkpoints, read_manifest, specs_of, threads
from common.sealed import sha


class FrozenLayout(Layout):
    """A net's tensors of which some are frozen. One that moves all the same is as well saved there."""

    def __init__(self, tensors, frozen):
        super().__init__(tensors)
        self.frozen = frozen

    def checked(self, tensors):
        named = super().checked(tensors)
        net = named["model"]
        trained = {name: tensor for name, tensor in net.items() if name not in self.frozen}
        return named | {"model": trained, "frozen": {name: net[name] for name in self.frozen}}

    def linked(self, path, frozen, run_dir):
        """Make a link to the newest checkpoint's file if it holds these very bytes; return its table.

        What stands still is compared, not known: a loop may change any weight.
        """
        for _, folder in checkpoints(run_dir)[:1]:
            # this file system has no links, say, or there is no room for a thread
            with suppress(Damaged, OSError, RuntimeError):
                table = read_manifest(folder)["files"].get(path.name)
                if table == table_of(frozen):
                    os.link(folder / path.name, path)
                    return table


def table_of(tensors):
    """Return the table of a file that would hold these tensors."""
    with ThreadPoolExecutor(threads() + 1) as pool:
        hashes = pool.map(hash_of, tensors.values())
    specs = specs_of(tensors)
    return {name: [*spec, digest] for (name, spec), digest in zip(specs.items(), hashes, strict=True)}


def hash_of(tensor):
    return sha(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
