"""--optimizer: what torch.optim has and takes, read from its files, because importing torch takes seconds."""
import ast
import functools
import importlib.util
import sys
from pathlib import Path

from common.errors import UserError

LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3}  # where the default is ours; these are fused
OWN_LR = 1e-3                                    # for a user's function
FLAGS = ("lr", "momentum", "weight_decay", "betas", "nesterov")  # arguments that have a flag of their own
REFUSED = {"lbfgs": "it computes the loss several times in one step",
           "sparseadam": "it takes only sparse gradients, and here they are dense"}


def default_lr(name):
    if name not in LR and name in known():
        return float(takes(name)["lr"])
    return LR.get(name, OWN_LR)


@functools.cache
def known():
    """{name in lower case: (class, module)} of torch.optim."""
    found = [(alias.name, node.module) for node in _parsed("__init__")
             if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {name.lower(): (name, module) for name, module in found
            if name[0].isupper() and name != "Optimizer"}


@functools.cache
def takes(name):
    """{argument: default, as text} of an optimizer's constructor."""
    kind, module = known()[name]
    body = next(node.body for node in _parsed(module.rpartition(".")[2]) if getattr(node, "name", "") == kind)
    given = next(node.args for node in body if getattr(node, "name", "") == "__init__")
    names, defaults = given.args + given.kwonlyargs, given.defaults + given.kw_defaults
    pairs = zip(names[-len(defaults):], defaults, strict=True)
    return {arg.arg: ast.unparse(default) for arg, default in pairs if arg.arg != "differentiable"}


def _parsed(module):
    if not (torch := importlib.util.find_spec("torch")):
        raise UserError(f"{sys.executable} has no torch\n"
                        "launch/local.sh installs it into an environment of its own")
    folder = Path(torch.origin).with_name("optim")
    return ast.parse((folder / f"{module}.py").read_text(encoding="utf-8")).body


def keywords(text):
    """{name: value} of the text `name=value,name=value`; ValueError if one is no literal."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, RecursionError, ValueError):
        pass
    raise ValueError("is not a list of arguments like eps=1e-6,amsgrad=True")


def call_of(opts):
    """(class of torch.optim, its arguments) that the flags say."""
    values = {flag: getattr(opts, flag) for flag in FLAGS if flag in takes(opts.optimizer)}
    given = {flag: value for flag, value in values.items() if value is not None and value is not False}
    more = keywords(opts.optimizer_args)
    fused = {"fused": True} if opts.optimizer in LR and "foreach" not in more else {}
    return known()[opts.optimizer][0], given | fused | more
