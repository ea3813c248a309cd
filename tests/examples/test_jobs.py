"""Jobs of pytorch/examples and others, each beside its plain loop, through a kill and three worlds."""

from pathlib import Path

import pytest
from beside import Job

HERE = Path(__file__).parent
NAMES = sorted({path.stem for path in HERE.glob("*.py")} - {"beside", "test_jobs"})


@pytest.mark.parametrize("name", NAMES)
def test_a_job_ends_as_its_plain_loop_through_a_kill_and_a_resize(name, tmp_path):
    Job(name).check(tmp_path)


def test_the_readme_names_each_job():
    readme = (HERE / "README.md").read_text()
    assert [name for name in NAMES if f"| {name}: " not in readme] == []
