"""What a run tells and writes down; a log never stops a training. No torch here."""

from common.ledger.account import Life, audit, deaths_of, lives_of, named, newest_lives, summarize
from common.ledger.ledger import Audit, Clock, Ledger
from common.ledger.log import Log
