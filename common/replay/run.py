"""A run as its folder tells it: options, kept checkpoints, digests; and its script, started once more."""
import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.checkpoint import checkpoints, describe
from common.errors import UserError
from common.ledger import lives_of
from common.options import Options

HOUSE = Path(__file__).resolve().parents[2]
FREE = {"epochs", "data_dir", "train_folder", "val_folder", "vocab_size", "threads", "device", "workers"}


class Run:
    """`steps` are those of its checkpoints, and 0 if it began there: that state follows from the seed."""

    def __init__(self, folder):
        self.folder = Path(folder)
        try:
            self.facts = json.loads((self.folder / "options.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{self.folder} holds no whole options.json\nname the folder of a run") from None
        self.options = self.facts["options"] | self.facts["identity"]
        self.lives = lives_of(self.folder)
        given = self.lives[-1][0].get("options", {})  # of the newest life: some may change at a restart
        defaults = Options(script=self.options["script"]).to_json()
        self.options |= {name: given.get(name, defaults[name]) for name in FREE}
        if self.options["task"] == "the script":
            raise UserError(f"{self.folder} was trained by a script with a loop of its own\n"
                            "start that script once more, with --resume and another run folder")
        self.script = "dp" if self.options["script"] == "dp" else "ddp"
        self.kept = dict(reversed(checkpoints(self.folder / "checkpoints")))  # of one step the latest facts
        if not self.kept:
            raise UserError(f"{self.folder} has no checkpoint\nthere is nothing to compare with")
        begins = self.lives[0][0]["step"]
        self.steps = sorted({*self.kept} | ({begins} if begins == 0 else set()))

    @property
    def exact(self):
        """Whether no number of processes changes a bit."""
        return bool(self.options["virtual_ranks"])

    @property
    def digests(self):
        """{step: the fingerprint that the ledger holds}; where a step was made again, the last one counts."""
        return {event["step"]: (event["model"], event["optimizer"])
                for events in self.lives for event in events if event["event"] == "digest"}

    def flags(self):
        """What the command line of its script says, as far as it decides the result."""
        defaults, found = Options(script=self.script).to_json(), []
        for field in fields(Options)[1:]:
            name, value = field.name, self.options.get(field.name)
            decides = field.metadata["fixed"] or name in FREE
            value = tuple(value) if isinstance(value, list) else value
            if decides and self.script in field.metadata["scripts"] and value not in (None, defaults[name]):
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                found.append("--" + name.replace("_", "-") + ("" if value is True else f"={text}"))
        return found

    def again(self, begin, end, folder, nproc=1):
        """Makes steps `begin` + 1 to `end` once more, in another run folder; returns it, and the seconds."""
        every = min(self.digests, default=0)
        flags = [f"--run-dir={folder}", f"--max-steps={end}", "--save-every=0", "--save-seconds=0",
                 "--eval-every=0", "--no-tensorboard", "--progress=off", f"--digest-every={every}",
                 f"--resume={self.kept[begin] if begin else 'auto'}"]
        flags += ["--memory-tier=off"] * (self.script == "ddp")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command = [sys.executable, *launcher * (nproc > 1), str(HOUSE / f"train_{self.script}.py"),
                   *self.flags(), *flags]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["without a word"]
            text = next((line for line in lines if line.startswith("error: ")), lines[-1])
            raise UserError(f"steps {begin + 1} to {end} of {self.folder} cannot be made again "
                            f"(exit code {done.returncode})\n{text}")
        return Run(folder), time.monotonic() - began


def digest_of(step, folder):
    """The digest of a checkpoint whose every byte was read; UserError if it is damaged."""
    whole, line = describe(step, folder)
    if not whole:
        raise UserError(f"{folder.parent}/{line}\nmove it away to compare with the others")
    return line.split()[-1]


def tensors_of(folder):
    """Every tensor of a checkpoint by name; rows of a sharded one are put together."""
    found = {}
    for part in ("model", "optimizer"):
        for path in sorted(folder.rglob(f"{part}.safetensors")):
            for name, rows in load_file(path).items():
                found.setdefault(name if part == "model" else f"optimizer's {name}", []).append(rows)
    return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in sorted(found.items())}


def first_difference(ours, theirs, tolerance=0.0):
    """The first tensor of two checkpoints that differs by more than the tolerance, in words; or None.

    The tolerance is a share of the tensor's largest value.
    """
    a, b = tensors_of(ours), tensors_of(theirs)
    for name in a | b:
        if name not in a or name not in b:
            return f"{name} is in one of them only"
        x, y = a[name], b[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name} has another shape or type"
        if not torch.equal(x, y):
            by, most = (x.double() - y.double()).abs().max().item(), x.double().abs().max().item()
            if not by <= tolerance * most:  # nan neither
                return f"{name} by {by:.2g}"
    return None
