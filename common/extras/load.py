"""The net of a run with its weights."""

from pathlib import Path
from typing import Any

from torch import nn

from common.data import DataFacts
from common.errors import UserError
from common.extras.chosen import weights_of
from common.extras.own_files import refuse_foreign_code
from common.models import build_model
from common.options import Options, read_options

# of a loop of one's own: a function that returns its net asks for nothing
NOT_KNOWN: dict[str, Any] = {"name": "the loop's", "known_classes": None, "sample_shape": (), "vocab": None}


def load(run: str | Path, which: str | int, model: str) -> nn.Module:
    """See common.models.load."""
    weights, facts = weights_of(Path(run), which)
    data = facts["data"] or NOT_KNOWN
    if not (facts["data"] or model):
        raise UserError(
            f"{run} was trained by a script of its own, which builds the net\n"
            f"name a function that returns that net: load({str(run)!r}, model='PATH/file.py:function')"
        )
    own = {"init_from": "", "init_skip": (), "freeze": (), "eval_only": True}
    given = read_options(run)
    if model:
        given["model"] = model
    else:
        _ask_for_its_file(run, given["model"])
        refuse_foreign_code(run, {"model": given["model"]})
    opts = Options(**given | own)
    net = build_model(opts, DataFacts(**data | {"sample_shape": tuple(data["sample_shape"])}))
    net.load_state_dict(weights | {name: weights[first] for name, first in facts["tied"].items()})
    return net.eval()


def _ask_for_its_file(run, model):
    """Refuse a --model whose file is not here: one beside the run may be a stranger's, as the run."""
    file, _, name = model.rpartition(":")
    if file.endswith(".py") and not Path(file).is_file():
        raise UserError(
            f"{run}: there is no file {file} here\n"
            f"name it: load({str(run)!r}, model='PATH/{Path(file).name}:{name}')"
        )
