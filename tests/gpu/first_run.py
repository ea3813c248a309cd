"""A training is killed after its first checkpoint, resumes, ends and is audited: for lease.py.

python tests/gpu/first_run.py --epochs=10     # flags of train_ddp.py
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(flags):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train = [sys.executable, ROOT / "train_ddp.py", *flags, f"--run-dir={run}"]
        train += ["--audit", "--no-tensorboard", "--progress=off", "--save-every=10"]
        first = subprocess.Popen(train)
        while first.poll() is None and not list(run.glob("checkpoints/step-*[0-9]")):
            time.sleep(0.001)
        first.kill()
        print("killed:", "it was training" if first.wait() == -9 else f"no, it ended: {first.returncode}")
        second = subprocess.run(train, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(second.stdout)
        print("device:", *re.findall(r"devices (.*)", second.stdout)[:1])
        print("resumed:", *re.findall(r"^.*resum.*", second.stdout, re.MULTILINE)[:1])
        print("speed:", *re.findall(r"[\d,]+ samples/s", second.stdout)[-1:])
        print("end:", *re.findall(r"^done at step.*", second.stdout, re.MULTILINE))
        ask = [sys.executable, "-m", "common.ledger", run, "--audit"]
        audit = subprocess.run(ask, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print("audit:", audit.stdout.strip())
        clean = "missed 0 repeated 0 " in audit.stdout
        sys.exit(second.returncode or audit.returncode or first.returncode != -9 or not clean)


if __name__ == "__main__":
    main(sys.argv[1:])
