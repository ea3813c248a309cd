"""`python -m common.checkpoint RUN`: see extras/exports.py."""

import sys

from common.options import extra

if __name__ == "__main__":
    sys.exit(extra("exports")())
