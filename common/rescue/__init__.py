"""How a life begins and how it ends: signals, survivors' save, hangs."""
from common.rescue.life import open_life
from common.rescue.rescue import Rescue

__all__ = ["Rescue", "open_life"]
