"""Which tensors a checkpoint of this run must have.

From {"model": {name: tensor}, "optimizer": ...} to the tables that a checkpoint of them must have, and to the
tensors into which its files are read.
"""

from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint.disk import Damaged
from common.checkpoint.folder import FROZEN, MODEL, OPTIMIZER
from common.checkpoint.tensors import DTYPES, specs_of
from common.errors import UserError

Named = dict[str, dict[str, Tensor]]  # {kind: {name: tensor}}


class Layout:
    """The net's tensors, each with its type and shape; what else is remembered comes as new tensors."""

    def __init__(self, tensors: Named):
        self.tensors = tensors["model"]
        self.specs = specs_of(self.tensors)
        self.remembered: dict[str, Tensor] = {}  # of the checkpoint that was read last

    def checked(self, tensors: Named) -> Named:
        """Return the same tensors by kind; UserError if the net's are not those of the start."""
        name = differs(specs_of(tensors["model"]), self.specs)
        if name:
            raise UserError(f"{name} came, went or changed after the start\nmake it when the net is made")
        return tensors

    def check(self, files: dict) -> None:
        """Raise Damaged unless the files hold this run's tensors, whichever of them were frozen then."""
        net = files[MODEL] | files.get(FROZEN, {})
        specs = {name: row[:2] for name, row in net.items()}
        name = differs(specs, self.specs)
        if name:
            raise Damaged(f"{name[:80]} is {specs.get(name)}, this run has {self.specs.get(name)}")
        for name in files[OPTIMIZER]:
            if not name.startswith("/") and name.rpartition("/")[0] not in self.specs:
                raise Damaged(f"{OPTIMIZER} has {name[:80]}, this run has no such weight")

    def targets(self, path: str, table: dict) -> dict[str, Tensor]:
        """Return the tensors into which a file with this table is read."""
        tensors = self.tensors
        if path == OPTIMIZER:
            tensors = {name: torch.empty(row[1], dtype=DTYPES[row[0]]) for name, row in table.items()}
            self.remembered = tensors
        return {name: tensors[name].detach() for name in table}


def differs(specs, others):
    """Return the first name of a tensor that only one of two nets has, or has in this form; or None."""
    return next((name for name in specs | others if specs.get(name) != others.get(name)), None)


# ---- beside the tensors --------------------------------------------------------------------------------
def facts_of(net: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint holds of a net beside its tensors: so `load` needs neither script nor data.

    `build_model` notes it, with the facts of the data.
    """
    return vars(net).get("_facts") or {"tied": tied_names(net), "data": {}}


def tied_names(net):
    """Return {name: first name} of weights with several names."""
    first = {weight: name for name, weight in net.named_parameters()}
    every_name = net.named_parameters(remove_duplicate=False)
    return {name: first[weight] for name, weight in every_name if first[weight] != name}
