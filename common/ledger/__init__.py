"""What a run tells and writes down; a log never stops a training. No torch here."""
from common.ledger.audit import audit
from common.ledger.clock import Clock
from common.ledger.lines import Audit, Ledger
from common.ledger.log import Log
from common.ledger.report import lives_of, summarize

__all__ = ["Audit", "Clock", "Ledger", "Log", "audit", "lives_of", "summarize"]
