"""The store on disk: atomic, asynchronous, verified, fenced."""
from common.checkpoint.identity import trusted, versions
from common.checkpoint.manifest import checkpoints, describe
from common.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "checkpoints", "describe", "trusted", "versions"]
