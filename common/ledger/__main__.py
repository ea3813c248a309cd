"""`python -m common.ledger RUN`: see extras/report.py."""

import sys

from common.options import extra

if __name__ == "__main__":
    sys.exit(extra("report")())
