"""One step: state, task, gradient, update; and evaluation."""

from common.training.evaluate import evaluate
from common.training.memory import Thing
from common.training.optimizer import build_optimizer
from common.training.replicas import Called, engines_of, on_device, prepare, replicate
from common.training.state import TrainState
from common.training.step import Gradient
from common.training.tasks import Task, find_task
from common.training.turns import Turns
