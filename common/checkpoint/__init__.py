"""The store on disk: atomic, asynchronous, verified, fenced."""
from common.checkpoint.identity import trusted, versions
from common.checkpoint.parts import open_store
from common.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "open_store", "trusted", "versions"]
