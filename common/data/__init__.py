"""Datasets as batches: the same numbers at any world size."""

from common.data.loading import Batch, batches, forward_sizes, load_data, loaded, preload
from common.data.splits import Data, leaves, map_tensors

__all__ = [
    "Batch",
    "Data",
    "batches",
    "forward_sizes",
    "leaves",
    "load_data",
    "loaded",
    "map_tensors",
    "preload",
]
