"""A run as its folder tells it: options, kept checkpoints, digests; and its script, started once more."""
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

from common.checkpoint import checkpoints, describe
from common.errors import UserError
from common.ledger import lives_of
from common.options import Options, read_options

HOUSE = Path(__file__).resolve().parents[2]
FREE = {"epochs", "data_dir", "train_folder", "val_folder", "vocab_size", "threads", "device", "workers"}


class Run:
    """`steps` are those of its checkpoints, and 0 if it began there: that state follows from the seed."""

    def __init__(self, folder):
        self.folder = Path(folder)
        try:
            self.facts = read_options(self.folder)
        except (OSError, ValueError):
            raise UserError(f"{self.folder} holds no whole options.json\nname the folder of a run") from None
        self.lives = lives_of(self.folder)
        self.options = self.facts["options"] | self.facts["identity"]
        given = self.lives[-1][0].get("options", {})  # of the newest life: some may change at a restart
        defaults = Options(script=self.options["script"]).to_json()
        self.options |= {name: given.get(name, defaults[name]) for name in FREE}
        if self.options["task"] == "the script":
            raise UserError(f"{self.folder} was trained by a script with a loop of its own\n"
                            "start that script once more, with --resume and another run folder")
        self.script = "dp" if self.options["script"] == "dp" else "ddp"
        self.exact = bool(self.options["virtual_ranks"])  # no number of processes changes a bit
        self.kept = dict(reversed(checkpoints(self.folder / "checkpoints")))  # of one step the latest facts
        self.steps = sorted({*self.kept, *[0] * (self.lives[0][0]["step"] == 0)})
        self.digests = {event["step"]: (event["model"], event["optimizer"])  # of a step made again, the last
                        for events in self.lives for event in events if event["event"] == "digest"
                        and all(type(event.get(name)) is int for name in ("step", "model", "optimizer"))}

    def digest(self, step):
        """That of a checkpoint whose every byte was read; UserError if it is damaged."""
        whole, line = describe(step, self.kept[step])
        if not whole:
            raise UserError(f"{self.kept[step].parent}/{line}\nmove it away to compare the others")
        return line.split()[-1]

    def flags(self, script):
        """What the command line of this script says, as far as it decides the result."""
        defaults, found = Options(script=script).to_json(), []
        for field in fields(Options)[1:]:
            name, value = field.name, self.options.get(field.name)
            decides = field.metadata["fixed"] and name not in ("fork", "at", "skip") or name in FREE
            value = tuple(value) if isinstance(value, list) else value
            if decides and script in field.metadata["scripts"] and value not in (None, defaults[name]):
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                found.append("--" + name.replace("_", "-") + ("" if value is True else f"={text}"))
        return found

    def again(self, begin, end, folder, nproc=1, made="", every=None):
        """Makes steps `begin` + 1 to `end` once more, in another run folder; returns it, and the seconds."""
        flags = [f"--run-dir={folder}", f"--max-steps={end}", f"--resume={self.kept.get(begin, 'auto')}",
                 "--save-every=0", "--save-seconds=0", "--eval-every=0", "--no-tensorboard", "--progress=off",
                 f"--digest-every={every or min(self.digests, default=0)}"]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        head, house = interpreter(made)
        command, began = [*head, *launcher * (nproc > 1), f"{house}/train_{self.script}.py"], time.monotonic()
        done = subprocess.run([*command, *self.flags(self.script), *flags], stdout=subprocess.DEVNULL)
        if done.returncode:
            raise UserError(f"steps {begin + 1} to {end} of {self.folder} cannot be made again (see above)\n"
                            f"{command[-1]} ended with exit code {done.returncode}")
        return Run(folder), time.monotonic() - began


def interpreter(made):
    """(what starts Python, the folder of the code) of `PYTHON:FOLDER`; each may be left out."""
    python, _, folder = made.partition(":")
    house = Path(folder or HOUSE).resolve()
    return ["env", f"PYTHONPATH={house}", python or sys.executable], house
