"""A net cut into stages, over devices or ranks; only train_mp.py comes here."""

from common.pipeline.split import backward, describe, split
