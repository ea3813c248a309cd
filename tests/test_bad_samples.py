"""What a person is told when a sample or a loss is bad, and that what he is told works: the commands, typed as they stand."""
import re
import shlex

import pytest
from jobs import PACED


@pytest.mark.parametrize("every, begins", [(0, "starting at step 0"), (1, "going on at step 1")])
def test_after_a_loss_that_is_no_number_the_command_it_names_begins_another_run_there(jobs, tmp_path, every, begins):
    flags = [*PACED, "--optimizer=sgd", f"--save-every={every}"]
    job = jobs.python("train_ddp.py", *flags, f"--run-dir={tmp_path}/run", "--lr=1e308", PACE="0.2")  # a save has its time
    assert job.wait(60) == 5, job.output
    words = re.search("--run-dir NEW.*", job.output)[0].replace("NEW", f"{tmp_path}/new").replace("X", "0.001")
    job = jobs.python("train_ddp.py", *flags, *shlex.split(words), PACE="0")
    job.wait(60)                                                    # what was saved at such a rate may be lost
    assert begins in job.output, job.output
