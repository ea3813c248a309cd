"""--fork RUN --at N: a run of its own that shares the first N steps of RUN. No torch here."""
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from common.errors import UserError

OWN = {"run_dir", "resume", "max_steps", "eval_only"}  # never inherited


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


def newest_flags(run: Path | str) -> dict[str, Any]:
    """The flags of a run's newest life: a restart may have changed some since options.json was written."""
    with contextlib.suppress(OSError):
        for line in reversed(Path(run, "ledger.jsonl").read_bytes().splitlines()):
            with contextlib.suppress(ValueError):  # torn
                event = json.loads(line)
                if event["event"] == "life":
                    return event["options"]
    return read_options(run)["options"]


def inherited(given: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The flags of this run: those given, then its own of earlier lives or those of the run it leaves."""
    if not {"fork", "at"} & given.keys():
        return given
    if "resume" in given or not {"fork", "at", "run_dir"} <= given.keys():
        raise UserError("--fork needs --at and --run-dir, and no --resume\n"
                        "write --fork RUN --at N --run-dir NEW")
    source = given["run_dir"] if Path(given["run_dir"], "options.json").is_file() else given["fork"]
    try:
        old = newest_flags(source)
    except (OSError, ValueError) as error:
        raise UserError(f"--fork: {source}/options.json cannot be read: {error}\n"
                        "name the folder of a run") from None
    was = {name: tuple(value) if isinstance(value, list) else value for name, value in old.items()}
    return {name: value for name, value in was.items() if name in names - OWN} | given
