"""`python -m common.replay verify RUN`: see extras/replay.py."""

import sys

from common.extras.replay import main

if __name__ == "__main__":
    sys.exit(main())
