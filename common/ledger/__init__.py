"""What a run tells and writes down; a log never stops a training. No torch here."""
from common.ledger.account import history, lives_of, summarize
from common.ledger.audit import audit
from common.ledger.clock import Clock
from common.ledger.ledger import Audit, Ledger
from common.ledger.log import Log

__all__ = ["Audit", "Clock", "Ledger", "Log", "audit", "history", "lives_of", "summarize"]
