"""The net of a run with its weights."""

from pathlib import Path

from torch import nn

from common.checkpoint import weights_of
from common.data import DataFacts
from common.errors import UserError
from common.extras.own_files import refuse_foreign_code
from common.models import build_model
from common.options import Options, read_options


def load(run: str | Path, which: str | int, model: str) -> nn.Module:
    """See common.models.load."""
    weights, facts = weights_of(Path(run), which)
    if not facts["data"]:
        raise UserError(
            f"{run} was trained by a script of its own, which builds the net\n"
            f"build it there, and give it python -m common.checkpoint {run} --best --export w.pt"
        )
    own = {"init_from": "", "init_skip": (), "freeze": (), "eval_only": True}
    given = read_options(run)
    if model:
        given["model"] = model
    else:
        _ask_for_its_file(run, given["model"])
        refuse_foreign_code(run, {"model": given["model"]})
    opts = Options(**given | own)
    data = DataFacts(**facts["data"] | {"sample_shape": tuple(facts["data"]["sample_shape"])})
    net = build_model(opts, data)
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
