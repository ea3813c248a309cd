"""A training script with points to be struck at; what torchrun starts in the campaign."""

import importlib
import os
import sys
from pathlib import Path

import points

if __name__ == "__main__":
    points.point("import")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if "CHAOS_BUG" in os.environ:
        import bugs

        getattr(bugs, os.environ["CHAOS_BUG"])()
    from common.errors import guarded
    from common.options import parse_options

    script = os.environ.get("CHAOS_SCRIPT", "ddp")
    options = parse_options("the campaign's worker", script=script)
    train = importlib.import_module(f"train_{script}")
    points.plant()
    with guarded(debug=options.debug):
        train.main(options)
