"""Flags and environment: what is accepted, what is refused, and in which words."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from jobs import PACED, ROOT
from stores import two_checkpoints

from common.errors import blamed
from common.extras.own_files import call_user, load_file
from common.extras.rules import CLASHES, torchvision_models
from common.options import Options, flag_of, parse_options
from common.options.parser import FIRST_RUN, begin_life
from common.options.registry import DATASETS
from common.options.user import bytes_of
from common.place import here

TORCHRUN = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def parse(*argv, **how):
    return parse_options("Train.\n\n    python train_ddp.py", list(argv), **how)


def refused(capsys, *argv, **how):
    """What stderr says, after checking what every refusal owes: exit 2, three lines at most, stdout empty."""
    with pytest.raises(SystemExit, match="2"):
        parse(*argv, **how)
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and 2 <= said.err.count("\n") <= 3
    return said.err


@pytest.mark.parametrize(
    "argv, word",
    [
        ("--epochs 0", "'0' is not a whole number from 1"),
        ("--lr nan", "'nan' is not a number from 0"),
        ("--label-smoothing 1", "below 1"),
        ("--run-dir=", "is empty"),
        ("--amp bf8", "choose from"),
        ("--lr-schedule cosin", "did you mean cosine?"),
        ("--model resnet8", "did you mean resnet18?"),
        ("--model gtp:tiny", "'gtp:tiny' is unknown"),
        ("--dataset gone.py:f", "there is no file 'gone.py'"),
        ("--task own.py", "there is no function\n       write path/to/file.py:function"),
        ("--lerning-rate 1", "unknown argument '--lerning-rate'"),
        ("--global_batchsize 8", "did you mean --global-batch-size?"),
        ("--glob 8", "--glob"),  # no abbreviations
        ("--batch_size=8", "did you mean --global-batch-size, "),
        ("--learning-rate 1", "did you mean --lr?"),
        ("--precision bf16", "did you mean --amp bf16?"),
        ("--gpus 2", "did you mean torchrun --nproc_per_node=N, "),
        ("--optimizer-args eps=len", "--optimizer-args 'eps=len': ValueError"),
        ("--optimizer own.py:f --optimizer-args eps=1", "let the function do it"),
        ("--no-decay-1d", "there is no decay"),
        ("--optimizer rprop --warmup-epochs 1", "it looks at lr once"),
        (
            "--lr-schedule cosine --min-lr 1",
            "--lr 0.001 is not above --min-lr 1.0\n       raise --lr or",
        ),
        ("--lr 0", "--lr 0.0 is not above --min-lr 0.0\n       raise --lr\n"),
        ("--init-skip fc.", "nothing is taken over"),
        ("--freeze fc.,", "is empty"),
        ("--virtual-ranks 4 --compile", "--compile cannot take effect with --virtual-ranks"),
        ("--resume nowhere", "'nowhere' is not there"),
        ("--init-from nowhere.pt", "'nowhere.pt' is not there"),
        ("--run-dir file/run", "is not a folder"),
        ("--run-dir open", "anybody may write into 'open'\n       chmod o-w open"),
        ("--devices cpu,cpu", "train_dp.py and train_mp.py"),
    ],
)
def test_a_wrong_flag_is_refused_in_three_lines_with_its_name_or_value(capsys, argv, word):
    Path("file").touch()
    Path("own.py").write_text("def f(): pass\n")
    Path("open").mkdir()
    Path("open").chmod(0o777)
    assert word in refused(capsys, *argv.split())


def test_a_flag_of_a_script_is_compared_with_others(capsys):
    said = "--devices=*cuda* cannot take effect with --device=cpu"
    assert said in refused(capsys, "--devices=cuda:0,cuda:1", "--device=cpu", script="dp")


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_flag_of_one_dataset_is_refused_by_every_other(capsys, dataset):
    values = {"download": [], "bad_samples": ["skip"]}
    of_datasets = {flag for _, flags in DATASETS.values() for flag in flags}
    for flag in of_datasets.difference(Options(dataset=dataset).flags_of_dataset):
        said = refused(capsys, "--dataset", dataset, flag_of(flag), *values.get(flag, ["9"]))
        assert f"{flag_of(flag)} cannot take effect with --dataset {dataset}" in said


def test_no_rule_is_about_a_flag_with_which_a_start_skips_the_rules():
    ruled = {flag.partition("=")[0] for flag, _, _ in CLASHES}
    ruled |= {flag_of(flag) for _, flags in DATASETS.values() for flag in flags}
    assert not ruled & {flag_of(name) for name in FIRST_RUN}


def test_torchvisions_names_are_found_without_its_import():
    models = pytest.importorskip("torchvision").models
    assert {*torchvision_models()} == {*models.list_models(module=models)}


# ---- what was left open ---------------------------------------------------------------------------
def test_values_left_open_follow_from_the_others():
    sgd = parse("--optimizer", "SGD")
    assert (sgd.optimizer, sgd.lr, sgd.momentum) == ("sgd", 0.05, 0.9)
    assert parse("--optimizer", "sgd", "--momentum", "0").momentum == 0
    assert (
        parse().workers
        == Options(dataset="my.py:f").workers
        == 0
        < Options(dataset="imagefolder").workers
        <= 4
    )
    assert Options(model="my/nets.py:tiny").run_dir == Path("runs/nets.py-tiny-digits")
    assert Options(model="gpt:tiny").task == Options(dataset="tokens:64").task == "tokens"
    assert Options(model="gpt", task="classify").task == "classify"


@pytest.mark.parametrize("argv", ["--run-dir a_b --best -loss --audit", "--run_dir=a_b --audit --best=-loss"])
def test_both_spellings_of_a_flag_count_and_a_value_may_have_an_underscore_or_begin_with_a_minus(argv):
    opts = parse(*argv.split())
    assert (opts.run_dir, opts.best, opts.audit) == (Path("a_b"), "-loss", True)


# ---- identity -------------------------------------------------------------------------------------
FREE = (
    "run_dir resume epochs max_steps eval_only data_dir download workers device devices "
    "accept_data_change threads save_every save_seconds keep eval_every log_every progress tensorboard "
    "cross_check hang_timeout check_every audit debug show_scatter balance in_flight copy_to "
    "vocab_size patience best keep_every digest_every"
).split()


@pytest.mark.parametrize("name", [f.name for f in fields(Options)])
def test_a_restart_may_change_exactly_the_free_flags(name):
    """One row per flag, so that a new one must be put on one side or the other."""
    old = json.loads(json.dumps(Options().identity()))
    value = getattr(Options(), name)
    if isinstance(value, bool):
        value = not value
    else:
        value = value + 1 if isinstance(value, (int, float)) else "amsgrad=True"
    changed = replace(Options(), **{name: value}).compare(old)
    words = f"{flag_of(name)} was {old.get(name)!r}, now {value!r}"
    assert changed == ([] if name in [*FREE, "script"] else [words])


def test_a_flag_that_contradicts_the_run_is_refused_before_torch_is_imported(tmp_path):
    opts, root = two_checkpoints(tmp_path)
    flags = [f"--run-dir={opts.run_dir}", "--workers=0", "--dataset=imagefolder", "--data-dir=."]
    changed = "--dataset was 'digits', now 'imagefolder'; --lr was 0.001, now 0.5"
    done = run(*flags, "--lr=0.5")
    assert done.returncode == 2 and f"{opts.run_dir} is another run: {changed}" in done.stderr
    assert done.stdout == "" and done.stderr.count("\n") <= 3, done.stderr
    shutil.rmtree(root)
    root.mkdir()
    assert parse(*flags).dataset == "imagefolder", "nothing is saved: it may change"


# ---- the environment ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, word",
    [
        ({"RANK": "abc"}, "RANK='abc'"),
        ({"RANK": "2"}, "RANK='2', WORLD_SIZE='2'"),
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": None, "LOCAL_WORLD_SIZE": None, "RANK": "1"}, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK='2'"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE='3'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc'"),
    ],
)
def test_a_world_in_which_ranks_could_not_meet_is_refused(capsys, monkeypatch, change, word):
    for name, value in (TORCHRUN | change).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert word in refused(capsys)


def test_what_cannot_work_in_this_world_is_refused(capsys):
    assert "use train_ddp.py" in refused(capsys, script="dp", processes=2)
    how = {"script": "mp", "processes": 0}  # an agent does not know its size yet
    assert parse("--virtual-ranks=2", **how).virtual_ranks == 2
    said = refused(capsys, "--virtual-ranks=2", **how | {"processes": 3})
    assert "WORLD_SIZE=3 is more than --virtual-ranks 2" in said and "start at most 2 processes" in said


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # Kubernetes, a service "master"
        {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "tcp://10.0.0.1:80"},
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"},
    ],
)
def test_what_torchrun_kubernetes_and_people_rightly_set_is_accepted(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    begin_life()
    place = here()
    assert (place.rank, place.size) == (int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1)))


@pytest.mark.parametrize("flag", ["--stages=2", "--shard=2", "--recompute"])
def test_flags_of_a_net_in_parts_are_refused_with_the_way_to_keep_its_weights(capsys, flag):
    words = refused(capsys, flag, script="mp")
    assert "a process holds a whole net" in words and "--export FILE" in words and "--init-from" in words


# ---- the guard ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "error, word",
    [
        (RuntimeError("mmap: can't allocate memory: you tried to allocate 8 bytes"), None),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4321"), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (OSError(28, "No space left on device"), None),
        (FileNotFoundError(2, "No such file or directory", "pictures"), "FileNotFoundError"),
        (OSError("image file is truncated"), "truncated"),
        (ValueError("invalid literal"), "ValueError: invalid literal"),
    ],
)
def test_the_guard_blames_what_would_fail_again_and_lets_pass_what_may_pass(error, word):
    with pytest.raises(Exception) as caught, blamed("dataset mine.py:data", "mend mine.py"):
        raise error
    if not word:
        assert caught.value is error
        return
    fact, place, way_out = str(caught.value).splitlines()
    assert fact.startswith("dataset mine.py:data: ") and word in fact and way_out == "mend mine.py"
    assert place.startswith(f"{__file__}, line "), "the newest line that is neither ours nor a library's"


def test_a_users_file_that_was_changed_within_a_second_is_run_as_it_is_now(tmp_path, monkeypatch):
    """Python's cache knows a text by its second and its size; a run's identity knows all of it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for number in (1, 2):
        path.write_text(f"def net():\n    return {number}\n")
        os.utime(path, (1e9, 1e9))
        assert call_user(f"{path}:net") == number
        load_file.cache_clear()
        bytes_of.cache_clear()


def test_a_complete_run_says_so_before_net_and_data_are_made(jobs, run, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        f"import torch\ndef note(): open({str(tmp_path / 'made')!r}, 'a').write('x')\n"
        "def net(data): note(); return torch.nn.Linear(4, 2)\n"
        "def data():\n    note()\n    x, y = torch.ones(16, 4), torch.ones(16).long()\n"
        "    return x, y, x, y\n"
    )
    flags = [f"--model={own}:net", f"--dataset={own}:data", f"--run-dir={run}", "--max-steps=1"]
    jobs.python("train_ddp.py", *flags).ends_with(0)
    made = (tmp_path / "made").read_text()
    launcher = jobs.python("launch/torchrun.py", ROOT / "train_ddp.py", *flags)
    for job in (launcher, jobs.python("train_ddp.py", *flags), jobs.torchrun(2, "train_ddp.py", *flags)):
        assert job.ends_with(0).count("nothing left to train") == 1
    assert (tmp_path / "made").read_text() == made
    (run / "checkpoints/step-00000001/model.safetensors").write_bytes(b"")
    assert "model.safetensors is 0 bytes" in jobs.python("train_ddp.py", *flags).ends_with(3)


# ---- as a command ---------------------------------------------------------------------------------
def run(*argv, **how):
    """The options as a command, without what takes long to import."""
    code = (
        "import sys; from common.options import parse_options\n"
        "try: parse_options('Train.\\n\\n    python train_ddp.py\\n')\n"
        "finally: assert not {'torch', 'numpy', 'tensorboard', 'tqdm'} & set(sys.modules)"
    )
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, text=True, timeout=60, **how)


def test_help_opens_with_the_commands_and_names_every_flag_of_the_script_without_torch():
    done = run("--help")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Train.\n\n    python train_ddp.py")
    for field in fields(Options)[1:]:
        shown = re.search(rf"  {flag_of(field.name)}[ ,]", done.stdout)
        assert bool(shown) == ("ddp" in field.metadata["scripts"])


def test_an_error_that_cannot_be_printed_has_its_exit_code():
    with open("/dev/full", "w") as full:
        assert run("--lr", "nan", stderr=full).returncode == 2


def test_what_a_shell_has_closed_is_open_to_nowhere_before_any_file_takes_its_number():
    code = (
        "import os, sys; from common.options import parse_options; parse_options('')\n"
        "for end in (0, 1, 2): assert os.path.samestat(os.fstat(end), os.stat(os.devnull))\n"
        "print('nowhere', file=sys.stderr), sys.stdout.flush()"
    )
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_task_of_srun_or_mpirun_that_knows_of_no_other_is_refused(jobs, run, name):
    flags = (*PACED, "--max-steps=1", f"--run-dir={run}")
    said = jobs.python("train_ddp.py", *flags, **{name: "4"}).ends_with(2)
    assert f"{name}=4 without WORLD_SIZE" in said and said.count("\n") == 3, said
    # an agent a node is started so, too
    jobs.python("launch/torchrun.py", ROOT / "train_ddp.py", *flags, **{name: "4"}).ends_with(0)
