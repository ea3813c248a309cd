"""launch/kubernetes/*.yaml: each file says what a pod needs, and its command runs in a pod made here.

`kubernetes-validate` checks every object of Kubernetes itself and every Job inside a JobSet, strictly;
`kubeflow-trainer-api` checks the names and types of all fields of a JobSet. The rules of an API server beyond
the schemas, as far as these files touch them, are the assertions below. A pod needs util-linux 2.38.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import PACED, ROOT, children, reached, steps_on_disk, wait_for
from torch.distributed.run import get_args_parser

from common.options import parse_options
from launch.agent import FINAL

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
FOLDER = ROOT / "launch/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
# A pod, as far as namespaces go: process 1, a user without a name, all but the volume read-only.
SPACES = "unshare --net --user --map-root-user --mount --pid --fork --kill-child --mount-proc sh -c"
BEGIN = """
set -e
ip link set lo up 2> /dev/null || true  # a network that a test made has it up already
mount --make-rprivate /
mount --rbind "$VOLUME" "$VOLUME"
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt  # for /tmp, under which this project may lie
mount -o remount,bind,ro /
exec unshare --user --map-user=10001 --map-group=10001 setpriv --no-new-privs env -i "$@"
"""


def manifests(path):
    return list(yaml.safe_load_all(path.read_text()))


def jobs_in(path):
    """{name: Job} of a file, also of those inside a JobSet; the first object is one of both."""
    one = manifests(path)[0]
    inside = one["spec"].get("replicatedJobs", [])
    return {job["name"]: job["template"]["spec"] for job in inside} or {one["metadata"]["name"]: one["spec"]}


def training(path):
    """(Job, pod, container) of the training."""
    job = [job for name, job in jobs_in(path).items() if name != "store"][0]
    pod = job["template"]["spec"]
    return job, pod, pod["containers"][0]


@FILE
def test_the_manifests_obey_the_published_schemas(path):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is missing")
    for one in manifests(path):
        if one["kind"] == "JobSet":  # what it does not know it drops
            assert models.JobsetV1alpha2JobSet.from_dict(one).to_dict() == one
        else:
            kubernetes.validate(one, "1.33", strict=True)
    for name, job in jobs_in(path).items():
        inside = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job}
        kubernetes.validate(inside, "1.33", strict=True)


@FILE
def test_only_what_another_try_cannot_mend_fails_the_job(path):
    job, _, container = training(path)
    _, *rules = job["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
    codes = {rule["action"]: {*rule["onExitCodes"]["values"]} for rule in rules}
    own = codes.pop("FailIndex", set())  # of one machine: the others train on
    assert own == ({2, 5, 6} if path.stem == "jobset" else set())
    assert codes == {"FailJob": FINAL - own, "Ignore": {143}}


@FILE
def test_a_pod_has_time_to_save(path):
    _, pod, container = training(path)
    grace = pod["terminationGracePeriodSeconds"]
    seconds = {one["name"]: one.get("value") for one in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert grace >= 90 and int(seconds) == grace - 20


@FILE
def test_the_trainings_command_is_one_that_torchrun_and_the_script_take(path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: True)  # the folder is the pod's
    job, _, container = training(path)
    command = container["command"]
    assert command[:2] == ["python", "launch/torchrun.py"]
    agent = get_args_parser().parse_args(command[2:])
    assert agent.training_script == "train_ddp.py" and parse_options("", agent.training_script_args)
    assert agent.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    most = agent.nnodes.rpartition(":")[2]
    assert job.get("parallelism", 1) == job.get("completions", 1) == int(most)


def test_the_store_of_a_jobset_outlives_its_nodes():
    jobs = jobs_in(FOLDER / "jobset.yaml")
    store = jobs["store"]["template"]["spec"]
    grace = jobs["node"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert f'trap "sleep {grace}; ' in store["containers"][0]["command"][2]
    assert store["terminationGracePeriodSeconds"] > grace


def pod(volume, *words, **how):
    words = [*SPACES.split(), BEGIN, "sh", *words]
    return subprocess.Popen(words, cwd=ROOT, env=os.environ | {"VOLUME": str(volume)}, **how)


@pytest.mark.skipif(pod("/opt", "true").wait() != 0, reason="no namespaces can be made here")
def test_a_pod_trains_on_a_read_only_root_and_saves_when_it_is_asked_to_leave(tmp_path):
    container = training(FOLDER / "job.yaml")[2]
    variables = {one["name"]: one["value"] for one in container["env"]} | {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "TESTS_TOKEN": os.environ["TESTS_TOKEN"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": "/mnt",
        "PACE": "0.05",
    }
    words = [f"{name}={value}" for name, value in variables.items()]
    words += ["--nproc_per_node=1" if word.startswith("--nproc") else word for word in container["command"]]
    run = tmp_path / "train"
    log = tmp_path / "log"
    words += [*PACED, f"--run-dir={run}"]
    with open(log, "wb") as out, pod(tmp_path, *words, stdout=out, stderr=out) as node:
        try:
            wait_for(run, 3, job=SimpleNamespace(poll=node.poll, output=log))
            os.kill(children(node.pid)[0], signal.SIGTERM)
            assert node.wait(300) == 143, log.read_text()
        finally:
            node.kill()  # the whole pod goes with it
    assert "stopped on SIGTERM: step" in log.read_text() and reached(run) == steps_on_disk(run)[-1]
