"""Datasets as batches: the same numbers at any world size."""
from common.data.loading import Batch, Shares, batches, forward_sizes, from_workers, load_data, preload
from common.data.splits import Data, leaves, map_tensors

__all__ = [
    "Batch", "Data", "Shares", "batches", "forward_sizes", "from_workers", "leaves", "load_data",
    "map_tensors", "preload"]
