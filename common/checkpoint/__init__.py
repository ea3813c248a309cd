"""The store on disk: atomic, asynchronous, verified, fenced."""
from common.checkpoint.folder import checkpoints, describe
from common.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "checkpoints", "describe"]
