"""Datasets as batches: the same numbers at any world size."""

from common.data.loading import Batch, batches, load_data, loaded, preload
from common.data.splits import Data, leaves, map_tensors
