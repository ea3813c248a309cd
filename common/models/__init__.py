"""The registry of nets."""
from common.models.nets import build_model

__all__ = ["build_model"]
