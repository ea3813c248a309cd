"""Flags and environment: what is accepted, what is refused, and in which words."""
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from common.errors import UserError
from common.options import Options, call_user, environment, parse_options
from common.options.flags import flag_of
from common.options.rules import DATASET_FLAGS

ROOT = Path(__file__).parents[2]
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture(autouse=True)
def alone_in_an_empty_folder(monkeypatch, tmp_path):
    for name in (*TORCHRUN, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PET_RDZV_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def parse(*argv, script=None):
    return parse_options("Train.\n\n    python train_ddp.py", list(argv), script)


def refused(capsys, *argv, script=None):
    """What stderr says, after checking what every refusal owes: exit 2, at most three lines, nothing on
    stdout.
    """
    with pytest.raises(SystemExit) as end:
        parse(*argv, script=script)
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and said.err.startswith("error: ")
    assert 2 <= said.err.count("\n") <= 3
    return said.err


@pytest.mark.parametrize("argv, word", [
    (["--epochs", "-1"], "'-1' is not a whole number from 1"),
    (["--epochs", "0"], "--epochs"),
    (["--epochs", "1.5"], "--epochs"),
    (["--epochs"], "expected one argument"),
    (["--global-batch-size", "0"], "--global-batch-size: '0'"),
    (["--global-batch-size", "9" * 5000], "--global-batch-size"),
    (["--lr", "nan"], "--lr: 'nan' is not a finite number > 0"),
    (["--lr", "inf"], "--lr"),
    (["--lr", "1e999"], "--lr"),
    (["--lr", "0"], "--lr"),
    (["--lr=-1e-3"], "--lr"),
    (["--label-smoothing", "1"], "< 1"),
    (["--mixup=-0.1"], "--mixup"),
    (["--seed", str(2**63)], str(2**63 - 1)),
    (["--seed", "-1"], "--seed"),
    (["--keep", "1"], "--keep"),
    (["--optimizer", "adan"], "did you mean adam?"),
    (["--optimizer", "lbfgs"], "several times in one step"),
    (["--optimizer", "nadam", "--optimizer-args", "momntum=1"], "takes no momntum"),
    (["--optimizer", "nadam", "--optimizer-args", "momntum=1"], "momentum_decay, decoupled_weight_decay"),
    (["--optimizer", "nadam", "--optimizer-args", "eps=len"], "is not a list of arguments like"),
    (["--optimizer", "nadam", "--optimizer-args", "1) + f(eps=1"], "is not a list of arguments like"),
    (["--optimizer", "nadam", "--optimizer-args", "lr=1"], "lr has a flag of its own"),
    (["--optimizer", "nadam", "--betas", "0.9,1"], "< 1"),
    (["--betas", "0.9"], "two numbers"),
    (["--optimizer", "nadam", "--betas", "0.9,0.9", "--optimizer-args", "betas=(0,0)"], "betas has a flag"),
    (["--optimizer", "sgd", "--optimizer-args", "dampening=0.5"], "dampening"),
    (["--optimizer", "rprop", "--weight-decay", "0.1"], "--weight-decay cannot take effect"),
    (["--optimizer", "rprop", "--lr-schedule", "cosine"], "it looks at lr once"),
    (["--optimizer", "own.py:f", "--optimizer-args", "eps=1"], "let the function do it"),
    (["--optimizer", "own.py:f", "--weight-decay", "1", "--no-decay-1d"], "let the function do it"),
    (["--nesterov"], "--nesterov cannot take effect with --optimizer adam"),
    (["--optimizer", "sgd", "--betas", "0.9,0.9"], "--betas cannot take effect with --optimizer sgd"),
    (["--no-decay-1d"], "without --weight-decay"),
    (["--lr-schedule", "cosin"], "did you mean cosine?"),
    (["--lr-schedule", "own.py:f", "--warmup-epochs", "1"], "let the function do it"),
    (["--min-lr", "0.0001"], "--lr-schedule constant"),
    (["--lr-schedule", "cosine", "--min-lr", "1"], "is not below --lr 0.001"),
    (["--init-skip", "fc."], "without --init-from"),
    (["--lerning-rate", "1"], "unknown argument '--lerning-rate'"),
    (["--global_batchsize", "8"], "did you mean --global-batch-size?"),
    (["--glob", "8"], "--glob"),  # no abbreviations
    (["stray"], "unknown argument 'stray'"),
    (["--virtual-ranks", "65"], "slices without samples"),
    (["--virtual-ranks", "4", "--micro-batch-size", "8"],
     "--micro-batch-size cannot take effect with --virtual-ranks"),
    (["--virtual-ranks", "4", "--compile"], "--compile cannot take effect with --virtual-ranks"),
    (["--dataset", "digit"], "did you mean digits?"),
    (["--dataset", "digits:3x3"], "did you mean digits?"),
    (["--dataset", "zzz"], ", ".join(DATASET_FLAGS)),
    (["--run-dir", "a\nb"], "control character"),
    (["--run-dir", ""], "empty"),
    (["--run-dir", os.fsdecode(b"caf\xe9")], "not UTF-8"),
    (["--data-dir", "a\x1b[2J"], "control character"),
    (["--run-dir", "/"], "root of the file system"),
    (["--run-dir", "/tmp/.."], "root of the file system"),
    (["--run-dir", "data"], "data folder"),
    (["--run-dir", "x/../pictures/", "--dataset", "imagefolder", "--data-dir", "pictures"], "data folder"),
    (["--dataset", "imagefolder"], "data/train does not exist"),
    (["--dataset", "imagefolder", "--data-dir", "pictures"], "pictures/train does not exist"),
    (["--dataset", "imagefolder", "--data-dir", "pictures", "--train-folder", "a"], "pictures/a does not"),
    (["--dataset", "digits", "--image-size", "64"], "--image-size cannot take effect"),
    (["--dataset", "text", "--vocab-size", "64"], "--vocab-size cannot take effect"),
    (["--dataset", "tar", "--data-dir", "pictures"], "pictures/train*.tar exists"),
    (["--dataset", "tar", "--data-dir", "absent"], "absent/train*.tar exists"),
    (["--dataset", "tokens:64", "--data-dir", "pictures"], "pictures/train.bin does not exist"),
    (["--run-dir", "a" * 300], "cannot be used"),
    (["--resume", "nowhere"], "--resume: 'nowhere' is no folder"),
    (["--init-from", "nowhere.pt"], "--init-from"),
    (["--devices", "cpu,cpu"], "train_dp.py and train_mp.py"),
    (["--show-scatter"], "train_dp.py"),
    (["--momentum", "0.9"], "--optimizer adam"),
    (["--workers", "2"], "--dataset digits"),
    (["--download"], "--dataset digits"),
    (["--data-dir", "elsewhere"], "--dataset digits"),
    (["--dataset", "random", "--cutmix", "1"], "--cutmix"),
    (["--dataset", "sentiment", "--mixup", "1"], "--mixup"),
    (["--sync-bn", "--device", "cpu"], "--sync-bn"),
    (["--amp", "fp16", "--device", "cpu"], "--amp bf16"),
    (["--eval-only", "--resume", "none"], "nothing to evaluate"),
])
def test_a_wrong_flag_is_refused_in_three_lines_with_its_name_or_value(capsys, argv, word):
    assert word in refused(capsys, *argv)


@pytest.mark.parametrize("script, argv, word", [
    ("dp", ["--sync-bn"], "train_ddp.py"),
    ("dp", ["--virtual-ranks", "8"],
     "belongs to train_ddp.py and train_mp.py"),
    ("dp", ["--devices", "cuda:0,gpu"], "not a list of devices"),
    ("dp", ["--devices", "cpu,cuda"], "one kind"),
    ("dp", ["--devices", "cuda:0,cuda:1", "--device", "cpu"], "contradicts"),
    ("mp", ["--show-scatter"], "train_dp.py"),
    ("mp", ["--stages", "2"], "cannot be divided"),
    ("mp", ["--stages", "1", "--devices", "cpu,cpu"], "--devices"),
    ("mp", ["--balance", "tim"], "did you mean time"),
    ("mp", ["--schedule", "gpip"], "did you mean gpipe"),
    ("mp", ["--virtual-ranks", "4", "--schedule", "gpipe"], "--schedule cannot take effect"),
    ("ddp", ["--stages", "2"], "train_mp.py"),
    ("mp", ["--devices", "cpu"], "two devices"),
])
def test_flags_of_another_script_and_devices_that_cannot_be_are_refused(capsys, script, argv, word):
    assert word in refused(capsys, *argv, script=script)


def test_a_run_dir_that_is_a_file_or_lies_below_one_or_circles_is_refused(capsys, tmp_path):
    Path("file").touch()
    Path("circle").symlink_to("circle")
    Path("dangling").symlink_to("nowhere")
    for name in ("file", "file/run", "dangling"):
        assert "is not a folder" in refused(capsys, "--run-dir", name)
    assert "--run-dir" in refused(capsys, "--run-dir", "circle")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_run_dir_without_permission_is_refused(capsys):
    Path("closed").mkdir(mode=0o500)
    assert "not writable" in refused(capsys, "--run-dir", "closed/run")


def test_paths_with_spaces_and_any_language_are_fine(tmp_path):
    assert parse("--run-dir", "mein lauf/Größe 1").run_dir == Path("mein lauf/Größe 1")


def test_resume_takes_a_folder_that_exists():
    Path("other/checkpoints/step-00000010").mkdir(parents=True)
    assert parse("--resume", "other/checkpoints/step-00000010").resume == "other/checkpoints/step-00000010"


# ---- what was left open ---------------------------------------------------------------------------
def test_the_defaults_are_those_of_the_readme():
    opts = parse()
    assert (opts.model, opts.dataset, opts.optimizer, opts.lr, opts.momentum) == ("net", "digits", "adam",
                                                                                  1e-3, None)
    assert (opts.epochs, opts.global_batch_size, opts.seed, opts.keep, opts.data_dir) == (3, 64, 0, 3, "data")
    assert opts.run_dir == Path("runs/net-digits") and opts == Options()


def test_values_left_open_follow_from_the_others():
    sgd = parse("--optimizer", "sgd")
    assert (sgd.lr, sgd.momentum) == (0.05, 0.9) and parse("--optimizer", "adamw").lr == 1e-3
    assert parse("--optimizer", "sgd", "--momentum", "0").momentum == 0
    assert parse().workers == 0 and 1 <= Options(dataset="imagefolder").workers <= 4
    assert parse("--dataset", "random:100x10", "--model", "mlp").run_dir == Path("runs/mlp-random-100x10")
    assert parse("--model", "my/nets.py:tiny").run_dir == Path("runs/nets.py-tiny-digits")


def test_both_spellings_of_a_flag_count_and_values_keep_their_underscores():
    for argv in (["--run-dir", "a_b", "--lr-schedule", "cosine"], ["--run_dir=a_b", "--lr_schedule=cosine"]):
        opts = parse(*argv)
        assert opts.run_dir == Path("a_b") and opts.lr_schedule == "cosine"


def test_a_value_may_begin_with_a_minus_as_the_readme_has_it():
    for argv in (["--best", "-loss", "--audit"], ["--audit", "--best=-loss"]):
        opts = parse(*argv)
        assert opts.best == "-loss" and opts.audit


def test_the_script_is_known_by_its_file_name(monkeypatch):
    for name, script in (("train_dp.py", "dp"), ("/x/train_mp.py", "mp"), ("train_ddp.py", "ddp"),
                         ("pytest", "ddp")):
        monkeypatch.setattr(sys, "argv", [name])
        assert parse_options("", []).script == script
    assert parse("--devices", "cpu,cpu", script="dp").devices == ("cpu", "cpu")


# ---- identity -------------------------------------------------------------------------------------
FREE = {"run_dir", "resume", "epochs", "max_steps", "eval_only", "data_dir", "download", "workers", "device",
        "devices",
        "accept_data_change", "threads", "save_every", "save_seconds", "keep", "eval_every", "log_every",
        "progress", "tensorboard", "cross_check",
        "hang_timeout", "check_every", "audit", "profile", "debug", "show_scatter", "stages", "schedule",
        "balance",
        "recompute", "shard", "train_folder", "val_folder", "vocab_size", "log_to", "patience", "memory_tier",
        "best", "keep_every", "digest_every"}


def another(value):
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else "other"


@pytest.mark.parametrize("name", [f.name for f in fields(Options)])
def test_a_restart_may_change_exactly_the_free_flags(name):
    """One row per flag, so that a new one must be put on one side or the other."""
    old = json.loads(json.dumps(Options().identity()))
    value = {"optimizer": "adamw", "optimizer_args": "eps=1"}.get(name, another(getattr(Options(), name)))
    new = replace(Options(), **{name: value})
    changed = new.compare(old)
    assert changed == ([] if name in FREE | {"script"} else [(name, old[name], value)])


def test_an_identity_from_before_a_flag_existed_had_its_default():
    old = Options().identity()
    del old["ema_decay"]
    assert Options().compare(old) == []
    assert Options(ema_decay=0.9).compare(old) == [("ema_decay", 0.0, 0.9)]


def test_options_survive_json():
    opts = parse("--devices", "cpu,cpu", "--run-dir", "a b", script="dp")
    facts = json.loads(json.dumps(opts.to_json()))
    assert facts["run_dir"] == "a b" and facts["devices"] == ["cpu", "cpu"]
    assert set(facts) == {f.name for f in fields(opts)}


# ---- the environment ------------------------------------------------------------------------------
@pytest.mark.parametrize("change, word", [
    ({"RANK": "abc"}, "RANK='abc'"),
    ({"RANK": "-1"}, "RANK='-1'"),
    ({"RANK": ""}, "RANK=''"),
    ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2: ranks go from 0 to 1"),
    ({"RANK": "3"}, "RANK=3"),
    ({"RANK": None}, "RANK is not"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
    ({"WORLD_SIZE": "9" * 50}, "WORLD_SIZE"),
    ({"WORLD_SIZE": None, "LOCAL_WORLD_SIZE": None}, "WORLD_SIZE is not"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1"),
    ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0'"),
    ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
    ({"MASTER_PORT": None}, "MASTER_PORT is not"),
    ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc'"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT='0'"),
    ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR='a..b' cannot be resolved"),  # not even DNS could
    ({"GROUP_WORLD_SIZE": "2", "PET_RDZV_BACKEND": "c10d"}, "--rdzv_id=NAME"),
    ({"OMP_NUM_THREADS": "abc"}, "OMP_NUM_THREADS='abc'"),
    ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS"),
    ({"CUDA_VISIBLE_DEVICES": "abc"}, "CUDA_VISIBLE_DEVICES='abc'"),
    ({"CUDA_VISIBLE_DEVICES": "0,,1"}, "CUDA_VISIBLE_DEVICES"),
])
def test_an_environment_in_which_nobody_could_meet_is_refused_and_its_secrets_untold(capsys, monkeypatch,
                                                                                     change, word):
    for name, value in (TORCHRUN | change).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", "canary")
    err = refused(capsys)
    assert word in err and "canary" not in err


@pytest.mark.parametrize("environ", [
    {},
    {"WORLD_SIZE": "1"},
    # Kubernetes, for a service named master
    {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "tcp://10.0.0.1:80"},
    {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    TORCHRUN, TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"}, TORCHRUN | {"MASTER_ADDR": "::1"},
    TORCHRUN | {"MASTER_ADDR": socket.gethostname()},
    TORCHRUN | {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job7", "PET_RDZV_BACKEND": "c10d"},
    TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, TORCHRUN | {"GROUP_WORLD_SIZE": "2", "PET_RDZV_BACKEND": "static"},
    *({"CUDA_VISIBLE_DEVICES": v}
      for v in ("", "0", "0,2", "-1", "GPU-8f2c1a3b-0000", "MIG-GPU-8f/1/0", "NoDevFiles")),
    {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4,2"},
])
def test_what_torchrun_slurm_and_people_rightly_set_is_accepted_without_dns(monkeypatch, environ):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("no name server is needed here"))
    environment.check_environment(environ)


@pytest.mark.parametrize("command, value", [
    (["--rdzv_backend=c10d"], "c10d"), (["--rdzv-backend", "c10d", "x"], "c10d"),
    (["--rdzv_backend=a", "--rdzv-backend=b"], "b"),
    (["--rdzv_id=c10d"], "of the variable"), ([], "of the variable"), (["--rdzv_backend="], "")])
def test_the_agents_flags_are_read_as_torchrun_reads_them(command, value):
    assert environment.flag_in(command, "rdzv_backend", {"PET_RDZV_BACKEND": "of the variable"}) == value
    assert environment.flag_in([], "rdzv_backend", {}) is None


def test_a_resolver_that_never_answers_costs_seconds_not_minutes(monkeypatch):
    monkeypatch.setattr(environment, "RESOLVE_SECONDS", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(1))
    began = time.monotonic()
    with pytest.raises(UserError, match="cannot be resolved within"):
        environment.check_environment(TORCHRUN | {"MASTER_ADDR": "node7"})
    assert time.monotonic() - began < 0.9


def test_in_kubernetes_a_name_may_come_late_and_a_missing_one_is_worth_another_try(monkeypatch):
    def unknown(*_):
        asked.append(1)
        if len(asked) < 3 or len(asked) > 4:
            raise socket.gaierror(-2, "Name or service not known")

    asked, environ = [], TORCHRUN | {"MASTER_ADDR": "train-0", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    environment.check_environment(environ)
    asked.append(1)
    monkeypatch.setattr(environment, "LATE_SECONDS", 0.3)
    with pytest.raises(UserError, match="cannot be resolved") as refused:
        environment.check_environment(environ)
    assert refused.value.code == 1 and len(asked) > 4


def test_the_script_of_one_process_under_torchrun_is_sent_to_train_ddp(capsys, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "use train_ddp.py" in refused(capsys, script="dp")


@pytest.mark.parametrize("argv, word",
                         [(["--stages", "3"], "cannot be divided"), (["--devices", "cpu,cpu"], "--devices"),
                                        (["--virtual-ranks", "1", "--stages", "1"],
                                         "start at most 1 processes"),
                                        (["--virtual-ranks", "4", "--stages", "1", "--shard"],
                                         "--shard cannot take effect"),
                                        (["--memory-tier", "/", "--stages", "2"],
                                         "--memory-tier / cannot take effect"),
                                        (["--shard"], "one of each")])
def test_stages_over_processes_are_refused_what_cannot_work_there(capsys, monkeypatch, argv, word):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert word in refused(capsys, *argv, script="mp")


def test_an_agent_that_does_not_know_the_world_yet_leaves_its_size_to_the_workers(capsys):
    assert parse_options("", ["--stages", "2"], "mp", processes=0).stages == 2
    with pytest.raises(SystemExit):
        parse_options("", ["--stages", "2"], "mp", processes=1)
    assert "1 process cannot be divided into groups of 2" in capsys.readouterr().err


@pytest.mark.parametrize("environ, warned", [
    ({"PET_NNODES": "1:3"}, True), ({"PET_NNODES": "1:3", "RANK": "1"}, False), ({"PET_NNODES": "3"}, False),
    ({}, False),
    ({"PET_NNODES": "3:3"}, False), ({"PET_NNODES": "1:3", "TORCHELASTIC_USE_AGENT_STORE": "False"}, False)])
def test_rank_0_warns_where_torchrun_would_end_the_job_of_a_machine_that_joins_late(capsys, monkeypatch,
                                                                                    environ, warned):
    for name, value in (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"} | environ).items():
        monkeypatch.setenv(name, value)
    parse()
    said = capsys.readouterr().err
    assert said.count("\n") == warned and ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said) == warned


@pytest.mark.parametrize("environ, voices", [
    # by hand: each has a terminal of its own
    ({"RANK": "1", "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}, 1),
    ({"RANK": "1", "LOCAL_RANK": "1"}, 0),
    ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, 1),  # another machine has a log of its own
])
def test_a_wrong_flag_is_said_once_per_machine(capsys, monkeypatch, environ, voices):
    for name, value in (TORCHRUN | environ).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        parse("--lr", "nan")
    assert end.value.code == 2 and capsys.readouterr().err.count("error:") == voices


# ---- as a command ---------------------------------------------------------------------------------
def run(*argv, **kwargs):
    code = ("import sys; from common.options import parse_options\n"
            "try: parse_options('Train.\\n\\n    python train_ddp.py\\n')\n"
            "finally: assert not {'torch', 'numpy', 'tensorboard', 'tqdm'} & set(sys.modules)")
    return subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, text=True, timeout=60,
                          **{"capture_output": True, **kwargs})


def test_help_opens_with_the_commands_and_names_every_flag_of_the_script_without_torch():
    began = time.monotonic()
    done = run("--help")
    assert time.monotonic() - began < 1 and done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Train.\n\n    python train_ddp.py")
    for f in fields(Options)[1:]:
        assert (f"  {flag_of(f.name)} " in done.stdout) == ("ddp" in f.metadata["scripts"])


def test_a_wrong_flag_answers_without_torch_and_without_a_traceback():
    done = run("--epochs", "x")
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""


def test_help_into_a_full_disk_and_errors_into_a_closed_stderr_do_not_crash():
    with open("/dev/full", "w") as full:
        done = run("--help", capture_output=False, stdout=full, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, "")
        assert run("--lr", "nan", capture_output=False, stdout=subprocess.PIPE, stderr=full).returncode == 2


def test_without_torch_a_start_is_refused_with_a_way_out():
    for words in (["train_ddp.py"], ["launch/torchrun.py", "train_ddp.py"]):
        done = subprocess.run([sys.executable, "-S", *words],  # without site-packages
                              capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode == 2 and "has no torch\n" in done.stderr and done.stderr.count("\n") == 2


def test_what_a_shell_has_closed_is_open_to_nowhere_before_any_file_takes_its_number():
    code = ("import os, sys; from common.options import parse_options; parse_options('')\n"
            "for end in (0, 1, 2): assert os.path.samestat(os.fstat(end), os.stat(os.devnull))\n"
            "print('nowhere', file=sys.stderr), sys.stdout.flush()")
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0


def test_this_machine_must_reach_itself(monkeypatch):
    class Down(socket.socket):
        def connect(self, address):
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Down)
    with pytest.raises(UserError, match="does not reach itself"):
        environment.check_environment(TORCHRUN | {"MASTER_ADDR": "127.0.0.1"})


def test_the_datasets_known_to_options_are_those_of_data():
    registry = pytest.importorskip("common.data.datasets").DATASETS
    assert set(DATASET_FLAGS) == set(registry), \
        ("a dataset has a line in DATASETS of common/data/datasets.py and one in DATASET_FLAGS of "
         "common/options/options.py")


def test_a_users_file_that_was_changed_within_a_second_is_run_as_it_is_now(tmp_path, monkeypatch):
    """Python's cache knows a text by its second and its size; a run's identity knows all of it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path, told = tmp_path / "mine.py", []
    for number in (1, 2):
        path.write_text(f"def net():\n    return {number}\n")
        os.utime(path, (1e9, 1e9))
        told.append(call_user(f"{path}:net"))
        for name in [name for name in sys.modules if name.startswith("user_mine_")]:
            monkeypatch.delitem(sys.modules, name)
    assert told == [1, 2]
