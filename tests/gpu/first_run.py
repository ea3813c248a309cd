"""A training is killed after its first checkpoint, resumes, ends and is audited: for lease.py.

python tests/gpu/first_run.py --epochs=10     # flags of train_ddp.py
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), f"{ROOT}/tests/tools"]

from jobs import audit, until  # noqa: E402


def main(flags):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train = [sys.executable, ROOT / "train_ddp.py", *flags, f"--run-dir={run}"]
        train += ["--audit", "--no-tensorboard", "--progress=off", "--save-every=10"]
        first = subprocess.Popen(train)
        until(lambda: first.poll() is not None or [*run.glob("checkpoints/step-*[0-9]")], "a checkpoint")
        first.kill()
        print("killed:", "it was training" if first.wait() == -9 else f"no, it ended: {first.returncode}")
        second = subprocess.run(train, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(second.stdout)
        for what, words in (
            ("device", r"devices (.*)"),
            ("resumed", r"(.*resum.*)"),
            ("speed", r".*?([\d,]+ samples/s)"),
            ("end", r"(done at step.*)"),
        ):
            print(f"{what}:", *re.findall(rf"^{words}", second.stdout, re.MULTILINE)[-1:])
        counts = audit(run)
        print("audit:", counts)
        sys.exit(second.returncode or first.returncode != -9 or counts["missed"] or counts["repeated"])


if __name__ == "__main__":
    main(sys.argv[1:])
