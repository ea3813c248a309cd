"""Optimizers: what one needs to be complete, so that adding one is two lines."""
import pytest
from torch import nn

from common.options import Options
from common.options.options import LR
from common.pipeline.stages import _copies
from common.training import build_optimizer
from common.training.optimizer import OPTIMIZERS


def test_every_optimizer_has_a_default_learning_rate():
    assert set(OPTIMIZERS) == set(LR), (
        f"{set(OPTIMIZERS) ^ set(LR)}: an optimizer is a line in OPTIMIZERS (common/training/optimizer.py) "
        "and its default rate a line in LR (common/options/options.py)")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_fused_as_options_json_says_of_it(name):
    optimizer = build_optimizer(nn.Linear(3, 2), Options(optimizer=name))
    assert optimizer.param_groups[0]["fused"], (
        f"--virtual-ranks records the optimizer as \"fused\" (bit_facts in common/world/determinism.py): say "
        f"there what {name} is")


@pytest.mark.parametrize("name, momentum, copies",
                         [("sgd", 0.0, 2), ("sgd", 0.9, 3), ("adam", None, 4), ("adamw", None, 4)])
def test_the_copies_of_a_weight_that_a_stage_needs_are_counted_in_the_optimizers_state(name, momentum,
                                                                                       copies):
    extra = {} if momentum is None else {"momentum": momentum}
    assert _copies(build_optimizer(nn.Linear(3, 2), Options(optimizer=name, **extra))) == copies
