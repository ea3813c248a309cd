"""launch/doctor.py: each check is seen to fail where it must."""
import collections
import fcntl
import importlib
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
from jobs import ROOT

SMALL = ["train_ddp.py", "--model=mlp", "--dataset=random"]
Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def doctor(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("doctor")


@pytest.fixture
def network(doctor):
    return importlib.import_module("network")


@pytest.fixture
def line(doctor, capsys):
    """The line of one check after a visit of the doctor, whose exit code says whether all lines are ok."""
    def look(check, *words, script=SMALL):
        code = doctor.main([*words, *script])
        said = capsys.readouterr().out
        assert code == ("mend " in said)
        return said.partition(f"{check}: ")[0].splitlines()[-1] + said.partition(f"{check}: ")[2]
    return look


def test_a_healthy_machine_gets_a_line_for_each_check_and_nothing_is_left(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "launch/doctor.py", "--nproc_per_node=2", ROOT / SMALL[0],
                           *SMALL[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [text.partition(":")[0] for text in lines] == [
        "ok    run folder", "ok    locks", "ok    files", "ok    versions", "ok    room",
        "ok    shared memory", "ok    grace"]
    assert not list(tmp_path.iterdir()) and done.stderr == ""


@pytest.mark.parametrize("launcher", [
    [ROOT / "launch/local.sh", "--check", "--nproc=2"],
    [sys.executable, ROOT / "launch/torchrun.py", "--check", "train_ddp.py"]], ids=["local", "torchrun"])
def test_a_launcher_that_only_checks_is_the_doctor(launcher, tmp_path):
    env = os.environ | {"VIRTUAL_ENV": sys.prefix}
    done = subprocess.run([*launcher, "--run-dir", "/dev/full/run"], env=env, cwd=tmp_path, timeout=60,
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("mend  flags"), done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_wrong_flags_of_the_training_and_of_torchrun_are_found(doctor, line, capsys):
    assert doctor.main([*SMALL, "--lr", "nan"]) == 1 and "mend  flags" in capsys.readouterr().out
    assert doctor.main(["--nnodes=many", *SMALL]) == 1 and "mend  flags" in capsys.readouterr().out
    assert line("versions", "--nproc_per_nod=two=2", "--no-such-flag").startswith("mend  torchrun does not")


def test_a_script_of_ones_own_is_no_flag_and_one_that_is_not_there_is_found(doctor, tmp_path, capsys):
    assert doctor.main([str(tmp_path / "nowhere.py")]) == 1
    assert "nowhere.py does not exist" in capsys.readouterr().out
    (tmp_path / "mine.py").touch()
    job = doctor.job_of(["--nproc_per_node=3", str(tmp_path / "mine.py"), "--lr", "its own"])
    assert job.agent == ["--nproc_per_node=3"] and "is not looked at" in capsys.readouterr().out


def test_a_folder_of_others_and_one_that_cannot_rename_are_found(line, monkeypatch, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o777)
    assert "is not yours alone" in line("run folder", script=[*SMALL, f"--run-dir={run}"])
    run.chmod(0o700)
    assert line("run folder", script=[*SMALL, f"--run-dir={run}"]).startswith("ok")
    monkeypatch.setattr(os, "rename", shutil.copyfile)
    assert "does not take the other one's place" in line("run folder")


def test_locks_that_two_processes_get_or_nobody_are_found(line, monkeypatch):
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lambda *_: None)
    assert "mend  two processes get the same lock" in line("locks").replace("runs/mlp-random: ", "")
    monkeypatch.setattr(fcntl, "lockf", none)
    assert "no locks there (No locks available)" in line("locks")


def test_too_few_open_files_for_the_processes_of_all_machines_are_found(line, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 100))
    assert line("files", "--nproc_per_node=2").startswith("ok")
    assert "need 151 open files" in line("files", "--nnodes=1:4", "--nproc_per_node=8", "--rdzv_id=J",
                                         "--rdzv_backend=c10d", "--rdzv_endpoint=meeting")


def test_too_few_gpus_and_a_net_that_cannot_be_built_are_found(doctor, line, monkeypatch, tmp_path):
    (tmp_path / "m.py").write_text("def net(data):\n    raise ZeroDivisionError('my own net')\n")
    assert "my own net" in line("versions", script=[*SMALL[:1], "--model=m.py:net", "--dataset=random"])
    monkeypatch.setattr(doctor, "gpus", lambda: 1)
    assert "2 processes on this machine but 1 GPUs" in line("versions", "--nproc_per_node=2")


def test_a_disk_without_room_for_the_checkpoints_is_found(line, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 10))
    assert "3 + 1 checkpoints" in line("room") and line("room").startswith("mend")


def test_a_shared_memory_too_small_for_the_loading_processes_is_found(doctor, monkeypatch):
    opts = SimpleNamespace(workers=4, global_batch_size=64)
    job = SimpleNamespace(opts=opts, each="2", data=SimpleNamespace(
        train=SimpleNamespace(in_memory=False), sample_shape=(3, 224, 224)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 400e6))
    assert "/dev/shm has 400 MB free of 308 MB" in doctor.shared_memory(job)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 64e6))
    with pytest.raises(doctor.UserError, match="/dev/shm has 64 MB free, loading processes need 308 MB"):
        doctor.shared_memory(job)


def test_a_state_that_cannot_be_written_before_the_kill_is_found(line, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1e-9")
    assert "the launcher kills after 0 s" in line("grace")


@pytest.mark.parametrize("endpoint, words", [
    ("localhost:29400", "localhost is "), ("127.0.1.1:29400", "127.0.1.1 is 127.0.1.1 here"),
    ("no.such.host.invalid:29400", "cannot be resolved"), (None, "no place where they meet")])
def test_a_meeting_place_that_others_cannot_reach_is_found(network, endpoint, words):
    host, _, port = (endpoint or "").rpartition(":")
    job = SimpleNamespace(place=(host, int(port)) if port else None, file=endpoint, high=2)
    with pytest.raises(network.UserError, match=words):
        network.address(job)


def test_a_name_service_that_is_slow_or_knows_this_machine_as_a_loopback_is_found(network, monkeypatch):
    job = SimpleNamespace(place=None)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    with pytest.raises(network.UserError, match="is 127.0.1.1 here, which other machines cannot reach"):
        network.name(job)
    answered = threading.Event()
    monkeypatch.setattr(network, "RESOLVE_SECONDS", 0.2)
    monkeypatch.setattr(socket, "gethostbyaddr", lambda _: (answered.wait(20),))
    with pytest.raises(network.UserError, match="the name service took 0.2 s"):
        network.name(job)
    answered.set()


def test_a_port_where_nothing_listens_or_that_is_not_reached_is_found(network, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = SimpleNamespace(place=server.getsockname(), hosted=True)
        assert network.port(job).endswith("answers")
    assert "is free on this machine" in network.port(job)
    monkeypatch.setattr(network, "is_own", lambda _: False)
    with pytest.raises(network.UserError, match="nothing listens at .*\nthere: python launch/store.py"):
        network.port(job)

    def refuse(*_, timeout):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(network.UserError, match="is not reached"):
        network.port(job)


# ---- several machines: processes, as a lock is a process's own ------------------------------------
def machine(name, folder, port, high=2, facts=None, late=0, blind=False, **broken):
    """What the doctor of one machine says; `broken` replaces what a broken machine would answer."""
    import network
    network.MEET_SECONDS = 2
    socket.gethostname = lambda: name
    folder.mkdir(exist_ok=True)
    clock = time.time
    time.time = lambda: clock() + late
    if blind:
        os.path.exists = lambda _: False
    for key, value in broken.items():
        setattr(network, key, value)
    job = SimpleNamespace(place=("127.0.0.1", port - 1), folder=folder, low=2, high=high,
                          facts=facts or {"code": "aaa", "data": "bbb"})
    try:
        return network.compare(job)
    except network.UserError as error:
        return str(error)


@pytest.fixture
def together(network, tmp_path):
    """What the doctors of machines that start together say."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def start(*each):
        with ProcessPoolExecutor(len(each), multiprocessing.get_context("fork")) as pool:
            said = [pool.submit(machine, f"node{i}", tmp_path / "run", port, **own)
                    for i, own in enumerate(each)]
            return [future.result(60) for future in said]

    return start


def always(_):
    return True


def test_machines_that_are_alike_are_told_so_and_who_shares_the_run_folder(together, tmp_path):
    assert together({}, {}) == ["2 are alike; one run folder for all"] * 2
    assert "each has a run folder of its own" in together({"blind": True}, {"blind": True})[0]
    three = together(*({"high": 3} for _ in range(3)))
    assert three == ["3 are alike; one run folder for all"] * 3


@pytest.mark.parametrize("own, words", [
    ({"late": 5}, "the clock of node"), ({"facts": {"code": "aaa", "data": "ccc"}}, "data is "),
    ({"facts": {"data": "bbb"}}, "code is ")])
def test_a_machine_with_another_clock_code_or_data_is_named_on_both(together, own, words):
    said = together({}, own)
    assert said[0] == said[1] and words in said[0] and "node0" in said[0] and "node1" in said[0]


def test_a_lock_that_two_machines_get_is_found(together):
    said = together({"gets_lock": always}, {"gets_lock": always})
    assert said[0] == said[1] and "gets a lock in the run folder that" in said[0]


def test_a_machine_that_stays_alone_is_told_so(together):
    assert together({})[0].startswith("1 of 2 to 2 machines came within")
