"""One step: state, forward, loss, backward, update; and evaluation."""
from common.training.backward import backward, own_copy, seed
from common.training.bitwise.buffers import average_buffers
from common.training.evaluate import evaluate
from common.training.loss import autocast, correct, inputs_and_targets, mix, summed_loss
from common.training.optimizer import build_optimizer
from common.training.prepare import distribute, fit, prepare, replicate, show_scatter
from common.training.state import TrainState

__all__ = [
    "TrainState", "own_copy", "autocast", "average_buffers", "backward", "build_optimizer", "distribute",
    "inputs_and_targets", "evaluate", "fit", "correct", "mix", "prepare", "replicate", "seed", "show_scatter",
    "summed_loss",
]
