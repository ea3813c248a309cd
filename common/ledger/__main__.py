"""`python -m common.ledger RUN`: see extras/report.py."""

import sys

from common.extras.report import main

if __name__ == "__main__":
    sys.exit(main())
