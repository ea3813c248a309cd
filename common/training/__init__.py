"""One step: state, task, gradient, update; and evaluation."""

from common.training.evaluate import evaluate
from common.training.optimizer import build_optimizer, parts_of
from common.training.replicas import Called, engines_of, on_device, prepare, replicate
from common.training.state import Thing, TrainState
from common.training.step import Gradient
from common.training.tasks import JUDGE, Task, find_task
