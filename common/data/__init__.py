"""Datasets as batches: the same numbers at any world size."""
from common.data.loading import Batch, batches, load_data
from common.data.prefetch import Shares, forward_sizes, from_workers, leaves, map_tensors
from common.data.synthetic import Data

__all__ = [
    "Batch", "Data", "Shares", "batches", "forward_sizes", "from_workers", "leaves", "load_data",
    "map_tensors"]
