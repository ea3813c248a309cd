"""launch/output.py: times before the lines of workers, and a file for each rank in RUN/logs."""
import fcntl
import importlib
import os
import re
import select
import signal
import subprocess
import sys

import pytest
from jobs import PACED, ROOT, state, until, wait_for

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
    """Sends the texts through the pipe of a worker, a write each, and closes it; all is shown then."""
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
    printer = module.Printer(run)
    printed(printer, 3, b"one\ntw", b"o\n\nthree")
    printer.finish()
    text = (run / "logs/rank-3.log").read_text()
    assert re.fullmatch(f"{TIME}one\n{TIME}two\n{TIME}\n{TIME}three\n", text)
    assert capfd.readouterr().out == text
    assert (run / "logs").stat().st_mode & 0o777 == 0o700
    assert (run / "logs/rank-3.log").stat().st_mode & 0o777 == 0o600


def test_a_ranks_files_have_a_limit_and_the_newest_lines_stay(module, run, monkeypatch, capfd):
    monkeypatch.setattr(module, "LOG_BYTES", 300)
    printer = module.Printer(run)
    printed(printer, 0, *(b"line %d\n" % number for number in range(50)))
    printer.finish()
    files = sorted((run / "logs").iterdir())
    assert [path.name for path in files] == ["rank-0.log", "rank-0.log.1"]
    assert all(path.stat().st_size <= 300 for path in files)
    lines = (files[1].read_text() + files[0].read_text()).splitlines()
    assert [line[20:] for line in lines] == [f"line {number}" for number in range(50 - len(lines), 50)]


def test_nothing_is_written_into_a_folder_that_is_no_run_yet(module, tmp_path, capfd):
    printer = module.Printer(tmp_path)
    printed(printer, 0, b"early\n")
    until(printer.unkept.empty, "the line to be looked at")
    assert not list(tmp_path.iterdir())
    (tmp_path / "options.json").touch()
    printed(printer, 0, b"late\n")
    printer.finish()
    assert re.fullmatch(f"{TIME}early\n{TIME}late\n", (tmp_path / "logs/rank-0.log").read_text())


def test_lines_are_shown_while_the_disk_of_the_run_stops(module, run, capfd):
    (run / "logs").mkdir()
    os.mkfifo(run / "logs/rank-0.log")  # to open it waits for a reader
    printer = module.Printer(run)
    printed(printer, 0, b"one\n")
    until(printer.unkept.empty, "the first line to wait for the disk")
    printed(printer, 0, b"two\n")
    shown = capfd.readouterr().out
    assert re.fullmatch(f"{TIME}one\n{TIME}two\n", shown)
    with open(run / "logs/rank-0.log") as file:
        printer.finish()
        assert file.read() == shown


def test_what_workers_print_after_their_launcher_was_killed_is_shown(module, run, monkeypatch, capfd):
    """They may save for minutes; an end that the launcher tells of is waited for some seconds only."""
    monkeypatch.setattr(module, "LAST_SECONDS", 0.1)
    for told in (False, True):
        output = module.Output(run)
        worker = output._pipe(0, 1)
        if told:
            output._send(module.FINISH)
        output.line.close()  # what the kernel does when it is killed
        end = os.pidfd_open(output.pid)
        assert bool(select.select([end], [], [], 10 if told else 1)[0]) == told
        os.close(end)
        if not told:
            os.write(worker, b"saved\n")
        os.close(worker)
        os.waitpid(output.pid, 0)
        assert re.fullmatch("" if told else f"{TIME}saved\n", capfd.readouterr().out)


def test_a_disk_that_stops_while_a_death_is_noted_does_not_make_the_launcher_deaf(tmp_path):
    """A worker dies; what notes it waits for ever; SIGTERM ends the launcher and that process."""
    script = tmp_path / "launcher.py"
    script.write_text(f"""if True:
        import json, os, signal, socket, sys
        sys.path[:0] = ["{ROOT}", "{ROOT}/launch"]
        import workers
        workers.NOTE_SECONDS = 0.1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (agent := os.fork()) == 0:
            for words in (["life"], ["start", 0, [], {{"RANK": "0"}}, ["", ""]]):
                theirs.send(json.dumps(words).encode())
            while json.loads(theirs.recv(1000))[0] != "leave":
                pass
            os._exit(143)
        def died(rank, how):
            print(rank, how, os.getpid(), flush=True)
            signal.pause()
        dies = lambda words: os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(workers.Workers(agent, ours, dies, print, died).serve())
    """)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as launcher:
        *words, noting = launcher.stdout.readline().split()
        assert words == "0 was killed by SIGKILL".split()
        launcher.send_signal(signal.SIGTERM)
        try:
            assert launcher.wait(20) == 1
        finally:
            launcher.kill()
    until(lambda: state(int(noting)) in "ZX", "the end of what notes", 10)


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
    assert "Warning" not in job.output


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_shell_may_close_the_launchers_streams(jobs, tmp_path, closed):
    run, out = tmp_path / "run", tmp_path / "out"
    command = [sys.executable, ROOT / "launch/torchrun.py", ROOT / "train_ddp.py", *PACED, "--epochs=1",
               f"--run-dir={run}"]
    with open(out, "wb") as file:
        done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *map(str, command)], stdout=file,
                              stderr=file, env=jobs.environment(), timeout=120)
    assert done.returncode == 0, out.read_text()
    assert "val_loss" in (run / "logs/rank-0.log").read_text() and "Traceback" not in out.read_text()


def test_a_script_may_have_modules_named_as_those_of_the_launcher(jobs, tmp_path):
    names = sorted(path.stem for path in (ROOT / "launch").glob("*.py"))
    for name in names:
        (tmp_path / f"{name}.py").write_text("MINE = 1")
    script = tmp_path / "mine.py"
    script.write_bytes(b"# -*- coding: latin-1 -*- \xe9\n" + b"".join(
        b"import %b; assert %b.MINE\n" % ((name.encode(),) * 2) for name in names))
    job = jobs.start(ROOT / "launch/torchrun.py", "--max_restarts=0", script)
    assert job.wait() == 0, job.output


@pytest.mark.parametrize("flags, words", [
    ("--nproc_per_node=many", "nproc_per_node"), ("--nproc_per_node=0", "out of range"),
    ("--nnodes=1:2:3", "MIN:MAX"), ("--max_restarts=x", "max_restarts"), ("--rdzv_backend=foo", "foo"),
    ("--rdzv_conf=x", "must have a value"), ("--start_method=x", "choose"), ("--nosuch", "unrecognized"),
    ("--tee=9", "9"), ("--log_dir=/proc/x", "/proc/x"),
    ("--rdzv_endpoint=127.0.0.1:99999", "65536"), ("", "required")])
def test_what_torchrun_cannot_start_with_is_said_in_lines_and_ends_with_2(monkeypatch, flags, words, capfd):
    monkeypatch.syspath_prepend(ROOT / "launch")
    agent, parent, flags = importlib.import_module("agent"), os.getpid(), flags.split()
    if (pid := os.fork()) == 0:
        try:
            os._exit(agent.serve([*flags, *["mine.py"] * len(flags)], None, parent, flags))
        finally:
            os._exit(9)
    code, said = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), capfd.readouterr().err
    assert code == 2 and words in said and "Traceback" not in said and "usage" not in said, said
