"""The store on disk: atomic, asynchronous, verified, fenced."""

from common.checkpoint.disk import Damaged
from common.checkpoint.folder import checkpoints, describe, read_facts, weights_of
from common.checkpoint.store import CheckpointStore
from common.checkpoint.tensors import mark, wait_by_asking
