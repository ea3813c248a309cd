"""Nets by name; `load` gives that of a run with its weights."""

from common.models.nets import build_model, load
