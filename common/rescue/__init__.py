"""How a life ends: signals, survivors' save, hangs."""

from common.rescue.rescue import Rescue
