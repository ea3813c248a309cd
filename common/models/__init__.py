"""The registry of nets."""
from common.models.nets import build_model
from common.models.weights import tied_names

__all__ = ["build_model", "tied_names"]
