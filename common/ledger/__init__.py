"""What a run tells and writes down; a log never stops a training. No torch here."""

from common.ledger.ledger import Audit, Clock, Ledger, read
from common.ledger.lives import Life, deaths_of, lives_of, named, newest_lives
from common.ledger.log import Log
