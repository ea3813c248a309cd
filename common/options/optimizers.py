"""--optimizer and --optimizer-args, as far as they can be read without torch."""
import ast
from typing import Any

from common.errors import UserError

OURS = ("sgd", "adam", "adamw")  # fused, and each weight's update is its own, as --shard needs
RATES = {  # torch's own where they are not 1e-3; tests/training compares them with torch
    "sgd": 0.05, "adadelta": 1.0, "adafactor": 0.01, "adagrad": 0.01, "adamax": 0.002, "asgd": 0.01,
    "nadam": 0.002, "rmsprop": 0.01, "rprop": 0.01}
RATE = 1e-3


def keywords(text: str) -> dict[str, Any]:
    """{name: value} of the text `name=value,name=value`."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, RecursionError, ValueError):
        pass
    raise UserError(f"--optimizer-args: {text!r} is not a list of arguments\nwrite eps=1e-6,amsgrad=True")
