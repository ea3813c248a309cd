"""Datasets as batches: the same numbers at any world size."""
from common.data.loading import Batch, batches, load_data
from common.data.prefetch import forward_sizes, leaves, map_tensors
from common.data.synthetic import Source

__all__ = ["Batch", "Source", "batches", "forward_sizes", "leaves", "load_data", "map_tensors"]
