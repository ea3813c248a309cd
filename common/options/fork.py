"""--fork RUN --at N: a run of its own that shares the first N steps of RUN. No torch here."""
import hashlib
import json
from pathlib import Path
from typing import Any

from common.errors import UserError


def read_options(run_dir: Path | str) -> dict[str, Any]:
    """What a run's options.json holds; ValueError if it is damaged."""
    try:
        facts = json.loads(Path(run_dir, "options.json").read_text(encoding="utf-8"))
        seal, text = facts.pop("seal"), json.dumps(facts, indent=1, sort_keys=True) + "\n"
        if hashlib.sha256(text.encode()).hexdigest() != seal:
            raise ValueError
        return facts | {"options": dict(facts["options"]), "identity": dict(facts["identity"])}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("options.json is damaged") from error


def inherited(given, names):
    """The flags of this run: those given, then its own of earlier lives or those of the run it leaves."""
    at = given.get("at", 0)
    first, _, last = given.get("skip", f"{at + 1}:{at + 1}").partition(":")
    good = first == str(at + 1) and last.isdecimal() and int(last) > at and \
        given.get("resume", "auto") in ("auto", "none") and {"fork", "at", "run_dir"} <= given.keys()
    if {"fork", "at", "skip"} & given.keys() and not good:
        raise UserError("--fork needs --at and --run-dir (--fork RUN --at N --run-dir NEW), and no --resume\n"
                        "--skip A:B leaves out the samples of the steps after --at N: A is N + 1")
    if "fork" not in given:
        return given
    path = next((path for folder in (given["run_dir"], given["fork"])
                 if (path := Path(folder, "options.json")).is_file()), Path(given["fork"], "options.json"))
    try:
        old = read_options(path.parent)["options"]
    except (OSError, ValueError) as error:
        raise UserError(f"--fork: {path} cannot be read: {error}\nname the folder of a run") from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in old.items()
            if name in names - {"run_dir", "resume", "max_steps", "memory_tier", "skip"}} | given
