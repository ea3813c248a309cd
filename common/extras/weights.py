"""Weights from elsewhere: of a file (--init-from), of another run (--fork, --resume), of a run for a notebook
(`load`); and layers that stand still (--freeze).
"""

import zipfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.checkpoint import facts_of
from common.data import DataFacts
from common.errors import UserError, blamed, say
from common.extras.chosen import choices_at, weights_of
from common.extras.own_files import refuse_foreign_code
from common.extras.take_over import take_over
from common.models import build_model
from common.options import Options, read_options
from common.store import Loaded, load_newest
from common.world import gather

# of a loop of one's own: a function that returns its net asks for nothing
NOT_KNOWN = {"name": "the loop's", "known_classes": None, "sample_shape": (), "vocab": None}


@torch.no_grad()
def load_weights(net, opts):
    """Copy the weights of --init-from into the net; prefixes of wrappers are removed from names.

    Weights whose names begin with one of --init-skip keep their own first values.
    """
    path = opts.init_from
    with blamed(f"--init-from {path}: not a file of weights", "save one: torch.save(net.state_dict(), path)"):
        tied = facts_of(net)["tied"]  # one of its names is enough
        tensors = {name: tensor for name, tensor in net.state_dict().items() if name not in tied}
        file = read_weights(path)
        bare = {unwrapped(name, tensors): tensor for name, tensor in file.items()}
        if len(bare) < len(file):
            raise ValueError("it holds a weight twice, wrapped and bare")
        weights = {tied.get(name, name): tensor for name, tensor in bare.items()}
        check_prefixes("--init-skip", opts.init_skip, [*tensors, *weights])
        names = [name for name in sorted({*tensors, *weights}) if not name.startswith(opts.init_skip)]
        wrong = [name for name in names if kind_of(weights.get(name)) != kind_of(tensors.get(name))]
        if wrong:
            layers = ",".join(dict.fromkeys(f"{name.rpartition('.')[0]}." for name in wrong[:12]))
            raise UserError(
                f"--init-from {path}: {len(wrong)} tensors do not fit this model, "
                f"the first: {wrong[0]} (in the file {kind_of(weights.get(wrong[0]))}, "
                f"in the model {kind_of(tensors.get(wrong[0]))})\n"
                f"choose the --model these weights belong to, or begin afresh: --init-skip {layers}"
            )
        for name in names:
            tensors[name].copy_(weights[name])


def unwrapped(name, known):
    """Remove from a name what DDP and torch.compile put before it, unless the net has it so."""
    if name not in known:
        name = name.replace("_orig_mod.", "")
    if name not in known:
        name = name.removeprefix("module.")
    return name


def kind_of(tensor):
    """Say what a tensor is: between two kinds, copy_ fails or changes numbers in silence."""
    if tensor is None:
        return "absent"
    if tensor.is_complex():
        return f"{tuple(tensor.shape)} of complex numbers"
    return f"{tuple(tensor.shape)} of {'real' if tensor.is_floating_point() else 'whole'} numbers"


def read_weights(path):
    """Read {name: tensor} of a .safetensors file, or of a pickle, from which only tensors are taken."""
    if path.endswith(".safetensors"):
        return load_file(path)
    weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(weights.get(key), dict):
            weights = weights[key]
    return weights


def freeze(net, opts):
    """Put the net into training mode, but for frozen weights (--freeze) and their modules.

    These stay in evaluation mode, as what a net's own function has frozen and put there: their BatchNorm uses
    the statistics it has, and their dropout is off.
    """
    still = [module for module in net.modules() if not module.training and is_frozen(module)]
    net.train()  # first, as a net may freeze parts of itself there
    prefixes = opts.freeze
    check_prefixes("--freeze", prefixes, [name for name, _ in net.named_parameters()])
    for name, parameter in net.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)
    still += [module for name, module in net.named_modules() if name and f"{name}.".startswith(prefixes)]
    for module in still:
        module.eval()
    if not opts.eval_only and is_frozen(net):
        raise UserError(
            f"model {opts.model}: no weight of it trains\n"
            "give it weights with requires_grad, or --freeze fewer"
        )


def is_frozen(module):
    """Return whether it has weights, and none of them trains."""
    trains = {p.requires_grad for p in module.parameters()}
    return trains == {False}


def check_prefixes(flag, prefixes, names):
    """Refuse a prefix with which no name begins."""
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            layers = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise UserError(f"{flag}: no weight's name begins with {prefix!r}\nthere are {layers[:300]}")


def load_another_run(state, world, layout, owns):
    """Load the newest checkpoint that was asked for; return where it came from. Call on every rank."""
    opts = state.opts
    source = opts.fork or opts.resume
    choices = [choice for choice in choices_at(Path(source)) if opts.at in (0, choice[0])]
    other = load_newest(world, layout, "", choices, owns)
    if not other.facts:
        raise UserError(
            f"{source}: no whole checkpoint of {f'step {opts.at}' if opts.at else 'any step'}\n"
            f"python -m common.checkpoint {source} says why",
            code=2 if opts.at else 3,
        )
    ours = optimizer_of(opts.identity())
    was = next(filter(None, gather(world, optimizer_of_run(choices))), ours)
    if was != ours:
        layout.remembered = {
            name: tensor
            for name, tensor in layout.remembered.items()
            if name.endswith("/ema") or name.startswith("/") and not name.startswith("/settings/")
        }
        if owns:
            say(f"{source} had the optimizer {' '.join(was).strip()}: this one begins without its state")
    state.load(other.facts, layout.remembered)
    take_over(state, world, other.facts, [], [], owns)
    return Loaded(source)


def optimizer_of_run(choices):
    """Return the optimizer with which these checkpoints were made; None if nobody knows here."""
    with suppress(UserError, OSError, IndexError):  # a checkpoint without its run, or none
        return optimizer_of(read_options(choices[0][1].parents[1]))


def optimizer_of(values):
    """Return the optimizer of these options, and its arguments; of a file its name."""
    return [values["optimizer"].rpartition("/")[2], values["optimizer_args"]]


def load(run, which, model):
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
        refuse_foreign_code(run, {"model": given["model"]})
    opts = Options(**given | own)
    net = build_model(opts, DataFacts(**data | {"sample_shape": tuple(data["sample_shape"])}))
    net.load_state_dict(weights | {name: weights[first] for name, first in facts["tied"].items()})
    return net.eval()
