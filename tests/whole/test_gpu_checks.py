"""The checks for GPUs, as far as CPUs can run them: a check that nobody runs is wrong when it is needed."""

import pytest
import test_more_gpus as more
import test_one_gpu as one
from jobs import ROOT


@pytest.mark.parametrize(
    "check",
    [
        one.test_a_save_that_is_still_copied_holds_the_weights_and_not_their_averages,
        one.test_stages_on_one_gpu_have_the_digest_and_the_loss_of_the_whole_net,
        more.test_a_kill_of_a_rank_loses_no_step_and_one_that_stands_still_ends_at_the_limit,
    ],
)
def test_with_cpus_for_gpus_a_check_of_each_kind_passes(jobs, tmp_path, monkeypatch, check):
    monkeypatch.setenv("TESTS_GPUS", "fake")
    monkeypatch.setattr(one, "SMALL", ("--epochs=1", "--max-steps=4"))
    check(jobs, *[tmp_path] * ("tmp_path" in check.__code__.co_varnames))


@pytest.mark.parametrize(
    "bench, flags", [("gpu", "--nets net,resnet18,gpt:tiny --steps 1"), ("checkpoint", "--mb 1")]
)
def test_the_benches_for_a_gpu_measure_all_they_promise(jobs, bench, flags):
    job = jobs.start(ROOT / f"tests/bench/{bench}.py", "--device=cpu", "--rounds=1", *flags.split())
    assert job.ends_with(0).count(" ms, ") >= 3
