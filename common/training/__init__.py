"""One step: state, task, gradient, update; and evaluation."""

from common.training.evaluate import evaluate
from common.training.optimizer import build_optimizer, parts_of, weights_of
from common.training.replicas import Called, on_device, prepare
from common.training.state import Stateful, TrainState
from common.training.step import Gradient, gradients_of
from common.training.tasks import IGNORED, OWN, Task, autocast, find_task, reduced, scored
