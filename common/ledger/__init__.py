"""What a run tells and writes down; a log never stops a training. No torch here."""

from common.ledger.account import audit, life_before, lives_of, summarize
from common.ledger.ledger import Audit, Clock, Ledger
from common.ledger.log import Log

__all__ = ["Audit", "Clock", "Ledger", "Log", "audit", "life_before", "lives_of", "summarize"]
