"""One step: state, forward, loss, backward, update; and evaluation."""
import common.training.loss as loss
from common.training.backward import backward, own_copy, seed
from common.training.bitwise.buffers import average_buffers
from common.training.bitwise.sums import dense
from common.training.evaluate import evaluate
from common.training.optimizer import build_optimizer
from common.training.prepare import distribute, fit, prepare, replicate, show_scatter
from common.training.state import TrainState

__all__ = [
    "TrainState", "average_buffers", "backward", "build_optimizer", "dense", "distribute", "evaluate", "fit",
    "loss", "own_copy", "prepare", "replicate", "seed", "show_scatter",
]
