"""Datasets as batches: the same numbers at any world size."""

from common.data.loading import DECIDING, PRELOADED, Batch, batches, load_data, loaded
from common.data.samples import (
    Data,
    DataFacts,
    Samples,
    data_of,
    is_picture,
    leaves,
    map_tensors,
    whole_targets,
)
