"""The registry of nets."""
from common.models.nets import MODELS, build_model

__all__ = ["MODELS", "build_model"]
