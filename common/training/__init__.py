"""One step: state, task, gradient, update; and evaluation."""

from common.training.evaluate import evaluate
from common.training.memory import Thing
from common.training.optimizer import build_optimizer
from common.training.pace import Pace
from common.training.replicas import Called, on_device, prepare
from common.training.state import TrainState
from common.training.step import Gradient, gradients_of, placed
from common.training.tasks import Task, autocast, find_task
from common.training.turns import Turns
