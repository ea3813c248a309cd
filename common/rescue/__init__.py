"""How a life begins and how it ends: signals, survivors' save, hangs, crash loops."""

from common.rescue.life import refuse_a_crash_loop
from common.rescue.rescue import Rescue
