"""Datasets as batches: the same numbers at any world size."""

from common.data.loading import Batch, batches, forward_sizes, load_data, loaded, preload
from common.data.samples import (
    WORDS,
    Data,
    DataFacts,
    Samples,
    as_input,
    data_of,
    leaves,
    map_tensors,
    whole_targets,
)
