"""The store on disk: atomic, asynchronous, verified, fenced."""
from common.checkpoint.parts import PartsStore
from common.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "PartsStore"]
