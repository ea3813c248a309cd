"""The registry of nets."""
from common.models.checks import named_tensors
from common.models.nets import build_model
from common.models.weights import tied_names

__all__ = ["build_model", "named_tensors", "tied_names"]
