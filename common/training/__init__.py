"""One step: state, task, forward, backward, update; and evaluation."""

from common.training.evaluate import evaluate
from common.training.optimizer import build_optimizer
from common.training.replicas import distribute, prepare
from common.training.state import TrainState
from common.training.step import Gradient, average, backward, odd_ranks, placed
from common.training.tasks import autocast, find_task, task_of
