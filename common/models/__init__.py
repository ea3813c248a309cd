"""The registry of nets."""
from common.models.checks import check_net, named_tensors
from common.models.nets import build_model
from common.models.weights import tied_names

__all__ = ["build_model", "check_net", "named_tensors", "tied_names"]
