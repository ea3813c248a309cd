"""Datasets as batches: the same numbers at any world size."""
from common.data.loading import Batch, batches, load_data

__all__ = ["Batch", "batches", "load_data"]
