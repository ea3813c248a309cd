"""What a run tells and writes down; a log never stops a training. No torch here."""

from common.ledger.ledger import Clock, Ledger, Lines, at_once, parse
from common.ledger.lives import TIME, Life, cut, is_whole, ledgers, named, newest_lives
from common.ledger.log import Log
