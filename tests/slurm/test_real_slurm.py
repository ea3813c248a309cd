"""launch/slurm.sbatch under a real Slurm on this machine: a controller and two "nodes", all started here."""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from jobs import CLEAN, PACED, ROOT, audit, children, command, family, free_port, lives, until, wait_for

DAEMONS = ("munged", "slurmctld", "slurmd")
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
ReturnToService=2
KillWait=30
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=60 State=UP PriorityTier=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-2] MaxTime=60 State=UP PriorityTier=10
"""


def place(name):
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Slurm:
    """The daemons, and what a person types; ends the jobs, then the daemons, which are children of ours."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.daemons = {}
        self.env = os.environ | {
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PYTHON": sys.executable,
            "PACE": "0.05",
            "TRAIN_HOST": "127.0.0.1",
        }

    def begin(self):
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        (self.folder / "key-file").touch(mode=0o600)
        (self.folder / "key-file").write_bytes(os.urandom(128))
        # TRAIN_PORT too: slurm.sbatch would derive it from the job's number, 1 in the Slurm of each test
        *ports, self.env["TRAIN_PORT"] = (str(free_port()) for _ in range(4))
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                folder=self.folder,
                host=socket.gethostname(),
                ports=ports,
                user=pwd.getpwuid(os.getuid()).pw_name,
            )
        )
        own = [
            f"--{name}={self.folder}/{name}" for name in "socket key-file pid-file seed-file log-file".split()
        ]
        self.start("munged", "--foreground", "--force", *own)
        until(lambda: (self.folder / "socket").exists(), "munged")
        self.start("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self.start("slurmd", "-D", "-N", node, name=node)
        nodes = "sinfo", "-h", "-N", "-p", "all", "-o", "%t"
        until(lambda: self.ask(*nodes).split() == ["idle"] * 2, "two idle nodes")

    def start(self, program, *words, name=None):
        with open(self.folder / f"{name or program}.out", "wb") as out:
            self.daemons[name or program] = subprocess.Popen(
                [place(program), *words], env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def end(self):
        if jobs := self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", "--signal=KILL", "--full", *jobs)
            self.ask("scancel", *jobs)
        until(lambda: not self.ask("squeue", "-h", "-t", "R,CG"), "the end of the jobs")
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *words, **env):
        """What a command of Slurm's prints."""
        env = self.env | env
        done = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=60)
        return done.stdout.strip()

    def submit(self, run, *words, options=(), **env):
        """The number of a new job."""
        options = ["--parsable", "--cpus-per-task=1", f"--output={self.folder}/%x-%A_%a.log", *options]
        job = self.ask("sbatch", *options, "launch/slurm.sbatch", *PACED, f"--run-dir={run}", *words, **env)
        assert job, "sbatch has refused it"
        return job

    def state(self, job):
        return self.ask("squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T")

    def fact(self, job, name):
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(.*?)(?=\s+[A-Z]\w*=|\n|$)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else None

    def log(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def reaches(self, job, state):
        try:
            until(lambda: self.state(job) == state, f"job {job} to be {state}")
        except AssertionError as error:
            raise AssertionError(f"{error}: it is {self.state(job)}\n{self.log()}") from None

    def starts_again(self, job):
        """Slurm would wait two minutes; in the second of its end it would refuse the job's credential."""
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")
        self.reaches(job, "RUNNING")


@pytest.fixture
def slurm():
    missing = [name for name in DAEMONS if not place(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: slurm-wlm and munge)")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        found = Slurm(folder)
        try:
            found.begin()
            yield found
        finally:
            found.end()


def test_a_job_on_two_nodes_is_warned_then_preempted_and_each_time_queued_again_with_its_reason(
    slurm, tmp_path
):
    run = tmp_path / "my run"
    options = ("--nodes=2", "--exclusive", "--cpus-per-task=2", "--job-name=my train")
    job = slurm.submit(run, "--epochs=4", options=options, PROCESSES="1")
    assert wait_for(run, 3)["world"] == 2
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    slurm.reaches(job, "PENDING")
    assert "stopped on SIGUSR1: step" in slurm.log() and "143, queued again" in slurm.log()
    assert slurm.fact(job, "Comment").startswith("stopped on SIGUSR1: step")
    slurm.starts_again(job)
    wait_for(run, 9, 1)
    high = slurm.ask(
        "sbatch", "--parsable", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    slurm.reaches(high, "COMPLETED")
    slurm.reaches(job, "PENDING")
    assert "stopped on SIGTERM: step" in slurm.log()
    slurm.starts_again(job)
    wait_for(run, 44, 2)
    slurm.reaches(job, "COMPLETED")
    assert [life["world"] for life in lives(run)] == [2] * 3 and audit(run) == CLEAN
    assert slurm.fact(job, "Restarts") == "2"


def test_a_lost_node_is_done_without_and_below_min_nodes_the_job_is_queued_again(slurm, run):
    job = slurm.submit(
        run, "--epochs=99", options=("--nodes=2",), PROCESSES="1", MIN_NODES="2", TRAIN_LOOK="0.5"
    )
    assert wait_for(run, 3)["world"] == 2
    node = slurm.daemons.pop("n2")
    (step,) = [
        step
        for step in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if re.match(rf"slurmstepd: \[{job}\.", command(step).replace("\0", " "))
        for pid in children(step)
        if "SLURMD_NODENAME=n2" in Path(f"/proc/{pid}/environ").read_text(errors="replace")
    ]
    for pid in reversed(family(step)):
        os.kill(pid, signal.SIGKILL)
    node.kill()
    node.wait()
    slurm.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.reaches(job, "PENDING")
    assert "queued again" in slurm.log() and "saved" in slurm.log()
    assert audit(run) == CLEAN


def test_bad_input_is_not_queued_again_and_a_cancelled_job_has_saved(slurm, run):
    wrong = slurm.submit(run, "--lr=nan")
    slurm.reaches(wrong, "FAILED")
    assert slurm.fact(wrong, "ExitCode") == "2:0" and "--lr" in slurm.fact(wrong, "Comment")
    job = slurm.submit(run, "--epochs=99")
    wait_for(run, 3)
    second = slurm.submit(run, "--epochs=99")
    slurm.reaches(second, "FAILED")
    assert slurm.fact(second, "ExitCode") == "6:0" and "in use by" in slurm.fact(second, "Comment")
    slurm.ask("scancel", job)
    slurm.reaches(job, "CANCELLED")
    assert list(run.glob("checkpoints/step-*/manifest.json"))
