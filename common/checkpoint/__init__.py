"""The store on disk: atomic, asynchronous, verified, fenced."""

from common.checkpoint.folder import checkpoints, describe, weights_of
from common.checkpoint.store import CheckpointStore
