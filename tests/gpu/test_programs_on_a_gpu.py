"""The programs of plain/ on one GPU, killed once, beside their plain loops on a CPU."""

import pytest
import torch
from gpus import fake, needs, visible
from program import loop, script
from test_programs import check, rows_by

pytestmark = needs(1)


@pytest.mark.parametrize(("program", "door"), rows_by(script, loop))
def test_a_program_has_the_numbers_of_a_plain_loop_or_is_refused_on_a_gpu(
    program, door, tmp_path, monkeypatch
):
    if type(program).__name__ == "Arcface":
        pytest.skip("its own tensors lie on a CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible(1))  # of its forks, which begin to use it
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else an optimizer here spoils CUDA for them
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    program.device = "cpu" if fake() else "cuda:0"
    program.lives = (1, 4), (1, 0)
    program.refused_at = {1} & {*program.refused_at}
    program.tolerance *= 100 if program.tolerance > 1e-4 else 10  # where it computes in 16 bits
    check(program, door, tmp_path)
