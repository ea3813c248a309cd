"""launch/kubernetes/*.yaml: each file says what a pod needs, and its commands run in pods made here.

What is checked of the schemas, where these packages are installed: `kubernetes-validate` checks every object
of Kubernetes itself and every Job inside a JobSet, strictly; `kubeflow-trainer-api` checks the names and
types of all fields of a JobSet. No API server looks at them here: its rules beyond the schemas, as far as
these files touch them, are the assertions below.
"""
import json
import os
import re
import signal
import time

import pods
import pytest
from jobs import PACED, ROOT, audit, lives, until, wait_for
from torch.distributed.run import get_args_parser

from common.options import parse_options
from launch.agent import FINAL
from tests.chaos.hosts import NET, Hosts

FOLDER = ROOT / "launch/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
WITHOUT = pods.why_not()
needs_pods = pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT or "-")
FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
TRAINING = [flag.replace(str(ROOT), "/app") for flag in PACED]


def objects(path, kind):
    return [one for one in pods.manifests(path) if one["kind"] == kind]


def jobs_in(path):
    """{name: Job} of a file, also of those inside a JobSet."""
    found = {one["metadata"]["name"]: one["spec"] for one in objects(path, "Job")}
    for one in objects(path, "JobSet"):
        found |= {job["name"]: job["template"]["spec"] for job in one["spec"]["replicatedJobs"]}
    return found


def training(path):
    """(Job, pod, container) of the training."""
    job = [job for name, job in jobs_in(path).items() if name != "store"][0]
    pod = job["template"]["spec"]
    return job, pod, pod["containers"][0]


@FILE
def test_the_manifests_are_yaml_as_others_read_it(path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert pods.manifests(path) == list(yaml.safe_load_all(path.read_text()))


@FILE
def test_the_manifests_obey_the_published_schemas(path):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is missing")
    for one in pods.manifests(path):
        if one["kind"] == "JobSet":  # what it does not know it drops
            assert models.JobsetV1alpha2JobSet.from_dict(one).to_dict() == one
        else:
            kubernetes.validate(one, "1.33", strict=True)
    for name, job in jobs_in(path).items():
        inside = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job}
        kubernetes.validate(inside, "1.33", strict=True)


@FILE
def test_only_what_another_try_cannot_mend_fails_the_job(path):
    job, pod, container = training(path)
    disrupted, fail, stopped = job["podFailurePolicy"]["rules"]
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget",
                                                                  "status": "True"}]}
    assert fail["action"] == "FailJob" and {*fail["onExitCodes"]["values"]} == FINAL
    assert stopped["onExitCodes"]["values"] == [143]
    assert {rule["onExitCodes"]["containerName"] for rule in (fail, stopped)} == {container["name"]}
    # or Kubernetes refuses such a policy
    assert pod["restartPolicy"] == "Never" and job["podReplacementPolicy"] == "Failed"
    if "backoffLimitPerIndex" in job or "successPolicy" in job:
        assert job["completionMode"] == "Indexed"


@FILE
def test_a_pod_has_time_and_memory_to_save_and_a_folder_of_its_claim(path):
    _, pod, container = training(path)
    environment = {one["name"]: one.get("value") for one in container["env"]}
    grace = pod["terminationGracePeriodSeconds"]
    assert grace >= 90 and int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == grace - 20
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory" and mounts["/tmp"]["emptyDir"] == {}
    claim, = objects(path, "PersistentVolumeClaim")
    assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    policy, = objects(path, "NetworkPolicy")  # the stores know no password
    sources = [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    assert policy["spec"].get("ingress") == (None if path.stem == "job" else sources)


@FILE
def test_the_trainings_command_is_one_that_torchrun_and_the_script_take(path):
    job, _, container = training(path)
    command = container["command"]
    assert command[:2] == ["python", "launch/torchrun.py"]
    agent = get_args_parser().parse_args(command[2:])
    assert agent.training_script == "train_ddp.py" and parse_options("", agent.training_script_args)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert agent.nproc_per_node == str(gpus)
    low, _, high = agent.nnodes.partition(":")
    assert job.get("parallelism", 1) == job.get("completions", 1) == int(high or 1)
    for budget in objects(path, "PodDisruptionBudget"):
        assert budget["spec"]["minAvailable"] == int(low)


def test_the_image_holds_what_a_training_imports():
    text = (FOLDER / "Dockerfile").read_text()
    copied = [word for words in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in words.split()]
    assert {"requirements.txt", "common", "launch", "train_ddp.py", "train_dp.py", "train_mp.py"} == {*copied}
    assert "-r requirements.txt" in text and "USER 10001:10001" in text


# ---- the commands, in pods ------------------------------------------------------------------------
@pytest.fixture
def start(tmp_path):
    """Starts a pod; all end with the test. `volume` is what all mount, `publish` the name service."""
    started, volume, known = [], tmp_path / "volume", {}
    volume.mkdir()

    def begin(name, spec, fields=(), network=(), change=(), **more):
        started.append(pods.Pod(tmp_path, network, name, spec, volume, dict(fields), change, **more))
        for entry in known.items():
            started[-1].learns(*entry)
        return started[-1]

    def publish(name, address):
        known[name] = address
        for pod in started:
            pod.learns(name, address)

    begin.volume, begin.publish = volume, publish
    yield begin
    for pod in started:
        pod.kill()


@needs_pods
def test_a_pod_trains_on_a_read_only_root_and_saves_when_it_is_asked_to_leave(start):
    _, spec, _ = training(FOLDER / "job.yaml")
    change = [("--nproc_per_node=8", ["--nproc_per_node=1"]), ("train_ddp.py", ["train_ddp.py", *TRAINING])]
    pod, run = start("train-0", spec, change=change, PACE="0.05"), start.volume / "train"
    wait_for(run, 3)
    pod.terminate()
    assert pod.wait(30) == 143, pod.log
    step = re.search(r"stopped on SIGTERM: step (\d+) saved", pod.log)[1]
    assert (run / f"checkpoints/step-{int(step):08}/manifest.json").is_file()


@needs_pods
@pytest.mark.long
def test_a_pod_leaves_at_once_whenever_it_is_asked(start):
    _, spec, _ = training(FOLDER / "job.yaml")
    change = [("--nproc_per_node=8", ["--nproc_per_node=1"]),
              ("train_ddp.py", ["train_ddp.py", *TRAINING, "--epochs=99"])]
    run = start.volume / "train"
    for late in (0.01, 0.7, 1.2, 2, 3, 5, None):
        before = len(lives(run))
        pod = start("train-0", spec, change=change, PACE="0.02")
        until(lambda pod=pod: pod.hears, "process 1 to hear signals, as soon as any Python can", 20)
        time.sleep(late) if late else wait_for(run, 3, before)  # the moments are what is tested
        began = time.monotonic()
        pod.terminate()
        assert pod.wait(30) == 143, (late, pod.log)
        assert time.monotonic() - began < 8, late
    step = re.search(r"stopped on SIGTERM: step (\d+) saved", pod.log)[1]
    after = start("train-0", spec, change=change[:1] + [("train_ddp.py", ["train_ddp.py", *TRAINING])])
    assert after.wait() == 0 and f"resuming at step {step}" in after.log, after.log
    assert audit(run) == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}


END = ("close", "closed", "leave", "left", "exit")  # then the training may be complete: 0
ASKED_AT = ("import", "join", "joined", "restore", "restored", "begin", "forward", "backward", "allreduce",
            "step-before", "step-inside", "step-torn", "step-after", "mkdir", "write:model.safetensors",
            "unsynced:manifest.json", "folder-synced", "rename", "renamed", "root-synced", "evaluate",
            "evaluating", "evaluated", "epoch-end", "epoch-ended", "rescue mkdir",
            "rescue unsynced:model.safetensors", "rescue rename", "rescue root-synced", *END)


@needs_pods
@pytest.mark.long
def test_a_pod_that_is_asked_at_any_moment_of_a_training_loses_no_step(start):
    """A pod after the other goes on with the run, until one is complete; each is asked at its moment."""
    _, spec, _ = training(FOLDER / "job.yaml")
    armed, journal, run = start.volume / "armed", start.volume / "journal", start.volume / "train"
    armed.mkdir(mode=0o777)
    armed.chmod(0o777)
    journal.touch()
    journal.chmod(0o666)

    def pod(epochs):
        flags = [*TRAINING, f"--epochs={epochs}"]
        change = [("--nproc_per_node=8", ["--nproc_per_node=2"]),
                  ("train_ddp.py", ["tests/chaos/worker.py", *flags])]
        return start("train-0", spec, change=change, PACE="0.01", CHAOS_ASKED="1", CHAOS_ARMED="/runs/armed",
                     CHAOS_JOURNAL="/runs/journal")

    for number, moment in enumerate(ASKED_AT):
        name = moment.removeprefix("rescue ")
        (armed / f"{name}.any").write_text("TERM")
        if name != moment:
            (armed / "forward.1").write_text("KILL")
        asked = pod(2 + number)
        code = asked.wait(60)
        landed = [line["point"] for line in map(json.loads, journal.read_text().splitlines())]
        journal.write_text("")
        print(moment, code, lives(run)[-1]["step"] if lives(run) else "-", flush=True)
        assert name in landed and code in (143, *[0] * (moment in END)), (moment, code, asked.log)
    last = pod(2 + len(ASKED_AT))
    assert last.wait() == 0, last.log
    assert audit(run) == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}


@pytest.fixture
def network():
    with Hosts(4) as hosts:
        yield lambda i: (["ip", "netns", "exec", hosts.name(i)], f"{NET}.{i}")


@needs_pods
@pytest.mark.long
def test_a_jobsets_nodes_come_and_go_while_names_lag_and_the_store_stays(start, network):
    path = FOLDER / "jobset.yaml"
    labels = "metadata.labels['jobset.sigs.k8s.io/{}']".format
    fields = {labels("jobset-name"): "train", labels("restart-attempt"): "0"}
    _, spec, _ = training(path)

    def node(i, **env):
        where, address = network(i + 2)
        change = [("--nproc_per_node=8", ["--nproc_per_node=1"]),
                  ("train_ddp.py", ["train_ddp.py", *TRAINING, "--epochs=20"])]
        return start(f"train-node-0-{i}", spec, fields | {"status.podIP": address}, where, change, **env)

    where, address = network(1)
    store = start("train-store-0-0", jobs_in(path)["store"]["template"]["spec"], {"status.podIP": address},
                  where)
    nodes = [node(0, PACE="0.1"), node(1, PACE="0.1")]
    until(lambda: "store on" in store.log, "the store", 30)
    time.sleep(3)  # so long nobody knows its name
    start.publish("train-store-0-0.train", address)
    run = start.volume / "train"
    wait_for(run, 3)
    until(lambda: lives(run)[-1]["world"] == 2, "both nodes", 60)
    count = len(lives(run))
    nodes[1].kill()
    assert wait_for(run, 6, life=count)["world"] == 1
    nodes[1] = node(1, PACE="0.02")
    until(lambda: lives(run)[-1]["world"] == 2, "the replacement", 60)
    assert [pod.wait(120) for pod in nodes] == [0, 0], nodes[0].log + nodes[1].log
    assert audit(run) == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
    os.kill(pods.children(store.process.pid)[0], signal.SIGTERM)
    assert store.wait(10) == 143, store.log  # or Kubernetes would call the store complete
