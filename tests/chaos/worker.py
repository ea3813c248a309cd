"""train_ddp.py with points to be struck at; what torchrun starts in the campaign."""
import os
import sys
from pathlib import Path

import points

if __name__ == "__main__":
    points.point("import")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if "CHAOS_BUG" in os.environ:
        from bugs import BUGS
        BUGS[os.environ["CHAOS_BUG"]]()
    from common.options import parse_options
    options = parse_options("the campaign's worker", script="ddp")
    import train_ddp
    points.plant(train_ddp)
    train_ddp.main(options)
