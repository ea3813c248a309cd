"""One step: state, task, forward, backward, update; and evaluation."""
import common.training.loss as loss
from common.training.backward import backward, placed, seed
from common.training.bitwise.buckets import dense
from common.training.cross_check import CrossCheck
from common.training.evaluate import evaluate
from common.training.optimizer import build_optimizer, factor
from common.training.prepare import distribute, prepare
from common.training.state import TrainState
from common.training.task import find_task

__all__ = [
    "CrossCheck", "TrainState", "backward", "build_optimizer", "dense", "distribute", "evaluate",
    "factor", "find_task", "loss", "placed", "prepare", "seed",
]
