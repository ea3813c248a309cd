"""launch/output.py: times before the lines of workers, and a file for each rank in RUN/logs."""
import fcntl
import importlib
import os
import re
import signal
import subprocess
import sys

import pytest
from jobs import PACED, ROOT, wait_for

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")
    return importlib.import_module("output")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "options.json").touch()
    return tmp_path


def printed(printer, rank, *texts):
    """Sends the texts through the pipe of a worker, a write each, and closes it."""
    ours, theirs = os.pipe()
    printer.add(ours, rank, 1)
    for text in texts:
        os.write(theirs, text)
        assert printer.read(ours)
    os.close(theirs)
    while printer.read(ours):
        pass
    assert not printer.sources


def test_a_line_has_its_time_once_and_a_last_one_without_an_end_is_not_lost(module, run, capfd):
    printed(module.Printer(run), 3, b"one\ntw", b"o\n\nthree")
    text = (run / "logs/rank-3.log").read_text()
    assert re.fullmatch(f"{TIME}one\n{TIME}two\n{TIME}\n{TIME}three\n", text)
    assert capfd.readouterr().out == text
    assert (run / "logs").stat().st_mode & 0o777 == 0o700
    assert (run / "logs/rank-3.log").stat().st_mode & 0o777 == 0o600


def test_a_ranks_files_have_a_limit_and_the_newest_lines_stay(module, run, monkeypatch, capfd):
    monkeypatch.setattr(module, "LOG_BYTES", 300)
    printed(module.Printer(run), 0, *(b"line %d\n" % number for number in range(50)))
    files = sorted((run / "logs").iterdir())
    assert [path.name for path in files] == ["rank-0.log", "rank-0.log.1"]
    assert all(path.stat().st_size <= 300 for path in files)
    lines = (files[1].read_text() + files[0].read_text()).splitlines()
    assert [line[20:] for line in lines] == [f"line {number}" for number in range(50 - len(lines), 50)]


def test_nothing_is_written_into_a_folder_that_is_no_run_yet(module, tmp_path, capfd):
    output = module.Printer(tmp_path)
    printed(output, 0, b"early\n")
    assert not list(tmp_path.iterdir())
    (tmp_path / "options.json").touch()
    printed(output, 0, b"late\n")
    assert re.fullmatch(f"{TIME}early\n{TIME}late\n", (tmp_path / "logs/rank-0.log").read_text())


def test_a_reader_that_stops_does_not_stop_the_launcher(jobs, tmp_path):
    """Its standard output is a pipe that nobody reads: SIGTERM ends the job all the same."""
    ours, theirs = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    run = tmp_path / "run"
    command = [sys.executable, ROOT / "launch/torchrun.py", "--nproc_per_node=2", ROOT / "train_ddp.py",
               *PACED, "--epochs=999", f"--run-dir={run}"]
    job = subprocess.Popen(list(map(str, command)), stdout=theirs, stderr=theirs,
                           env=jobs.environment(PACE="0.01"))
    os.close(theirs)
    try:
        wait_for(run, 200)  # lines, many times as long as the pipe
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 143
    finally:
        os.close(ours)
        job.kill()
        job.wait()


def test_each_rank_has_its_file_also_of_what_it_prints_past_python(jobs, tmp_path):
    (tmp_path / "bad.py").write_text(
        f"import os\nimport sys\nsys.path.insert(0, '{ROOT}/tests/tools')\nfrom paced import net as made\n"
        "def net(opts, data):\n    os.write(2, b'past Python %s\\n' % os.environ['RANK'].encode())\n"
        "    return made(opts, data)\n")
    flags = [*PACED, "--epochs=99", f"--run-dir={tmp_path / 'run'}"]
    job = jobs.start(ROOT / "launch/torchrun.py", "--nproc_per_node=2", ROOT / "train_ddp.py", *flags,
                     f"--model={tmp_path}/bad.py:net", PACE="0.02")
    wait_for(tmp_path / "run", 3, 0, job)
    job.kill(15)
    assert job.wait() == 143, job.output
    logs = [(tmp_path / f"run/logs/rank-{rank}.log").read_text() for rank in (0, 1)]
    assert re.search(f"^{TIME}epoch 1/99  step 1/", logs[0], re.MULTILINE), logs[0]
    for rank, log in enumerate(logs):
        assert re.search(f"^{TIME}past Python {rank}$", log, re.MULTILINE), log
        assert all(line in job.output for line in log.splitlines())
