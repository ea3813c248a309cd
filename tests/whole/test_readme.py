"""No README and no file of launch/ says what is not so: commands are parsed by what they start, or run."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from jobs import rows
from ranks import fork_ranks
from torch.distributed.run import get_args_parser

from common.options import Options, parse_options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(ROOT / name / "README.md" for name in ("common", "launch", "tests"))]
PAGES += [ROOT / ".github/SECURITY.md", ROOT / ".github/CONTRIBUTING.md"]
README, COMMON, *_ = (page.read_text(encoding="utf-8") for page in PAGES)
LONGEST = {"README.md": 130, "common/README.md": 250, "launch/README.md": 130, "tests/README.md": 70}
LONGEST |= {".github/SECURITY.md": 15, ".github/CONTRIBUTING.md": 15}
MADE = (  # by a reader or by a run
    "my_",
    "options.json",
    "metrics.jsonl",
    "ledger.jsonl",
    "model.",
    "optimizer.",
    "state.json",
    "manifest.json",
    "tb/",
    "audit/",
    "control/",
)
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


# ---- reading Markdown -----------------------------------------------------------------------------
def fenced(text, language):
    """The contents of ```language blocks."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [inside for name, inside in blocks if name == language]


def prose(text):
    return re.sub("^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def section(text, heading):
    assert f"\n## {heading}\n" in text, heading
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def commands(lines):
    """The commands among lines of shell, as lists of words; comments are gone, continued lines are joined."""
    joined = re.sub(r"\\\\?\n\s*", " ", lines)
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def documented():
    """(where, command): those of the READMEs, of docstrings, and of the heads of shell scripts."""
    shown = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        where = page.relative_to(ROOT).as_posix()
        for block in fenced(text, "sh"):
            shown += [(where, words) for words in commands(block)]
        inline = re.findall(
            r"`((?:launch/|tests/run|torchrun|sbatch|pip|python|CUDA)[^`\n]* [^`\n]*)`", prose(text)
        )
        shown += [(where, shlex.split(command)) for command in inline]
    for path in [*ROOT.glob("train_*.py"), *ROOT.glob("launch/*.py"), *(ROOT / "common").rglob("*.py")]:
        doc = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        lines = re.findall(r"^    (?:[A-Z_]+=\S+ )*(?:python|torchrun) .*(?:\n        .*)*", doc, re.M)
        shown += [(path.name, words) for words in commands("\n".join(lines))]
    for path in [*ROOT.glob("launch/*.s*h"), ROOT / "tests/run.sh"]:
        text = "\n".join(re.findall(r"^#     (.*)", path.read_text(), re.MULTILINE))
        text = re.sub(r"  +\w.*", "", text)  # what follows two spaces explains
        shown += [(path.name, words) for words in commands(text)]
    return [(where, words) for where, words in shown if not words[0].startswith("train_")]


# ---- commands -------------------------------------------------------------------------------------
def check_training(script, flags, monkeypatch):
    """The script exists, and its own parser takes the flags."""
    if script == "my_loop.py":  # another test runs it
        return
    assert (ROOT / script).is_file(), script
    monkeypatch.setattr(sys, "argv", [script])
    assert isinstance(parse_options("", flags), Options)


def check_flags(path, words, pattern='"--{}"'):
    text = path.read_text()
    assert all(pattern.format(word[2:]) in text for word in words if word.startswith("--")), words


def check(words, monkeypatch):
    """One command, by what it starts; a command that nothing here knows is a failure."""
    words = [words[0].removeprefix(".venv/bin/"), *words[1:]]
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value.replace("HOST", "127.0.0.1"))
    if words[:2] == ["python", "-m"]:
        base = ROOT / words[2].replace(".", "/")
        return check_flags(base / "__main__.py" if base.is_dir() else base.with_suffix(".py"), words)
    program, *rest = words[1:] if words[0] == "python" else words
    if program in ("torchrun", "launch/torchrun.py"):
        agent = get_args_parser().parse_args(rest)
        size = agent.nproc_per_node
        for name, value in {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", "1")
        check_training(agent.training_script, agent.training_script_args, monkeypatch)
    elif program == "launch/local.sh" and rest[:1] == ["-m"]:
        check(["python", *rest], monkeypatch)
    elif program in ("launch/local.sh", "launch/ssh.sh", "sbatch"):
        if program == "launch/ssh.sh":
            del rest[0]  # its machines
        if program == "sbatch":
            del rest[: rest.index("launch/slurm.sbatch") + 1]
        if "--nproc" in rest:
            at = rest.index("--nproc")
            del rest[at : at + 2]
        script = rest.pop(0) if rest and rest[0].endswith(".py") else "train_ddp.py"
        check_training(script, rest, monkeypatch)
    elif program == "launch/notice.py":
        if command := rest[2:] if rest[:1] == ["--file"] else rest:
            check(command, monkeypatch)
    elif program == "launch/drill.py":
        if command := rest[2:] if rest[:1] == ["--kills"] else rest:
            check(command, monkeypatch)
    elif program == "launch/store.py":
        assert len(rest) == 1 and re.fullmatch(r"\S+:\w+", rest[0]), words
    elif program.startswith("tests/bench/"):
        check_flags(ROOT / program, rest, " {}=")
    elif program in ("docker", "kubectl"):
        assert (ROOT / rest[rest.index("-f") + 1]).is_file(), words
    elif program == "tests/run.sh":
        assert all((ROOT / text).exists() for text in rest if text.startswith("tests/")), words
    elif program.startswith("train_"):
        check_training(program, rest, monkeypatch)
    else:
        assert program in ("pip", "tensorboard", "rm", "kill", "source"), (
            f"no test knows: {shlex.join(words)}"
        )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A reader's: data is looked for before torch is imported."""
    for path in (
        "my_own.py",
        "F",
        "data/train.bin",
        "data/val.bin",
        "data/train/x",
        "data/val/x",
        "runs/wide/x",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.setattr("os.access", lambda *_: True)  # not everybody may write to /shared
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "where, words", documented(), ids=lambda value: shlex.join(value) if isinstance(value, list) else value
)
def test_a_documented_command_is_understood_by_what_it_starts(where, words, monkeypatch, folder):
    check(words, monkeypatch)


def test_the_commands_of_the_first_pages_can_be_typed_one_after_the_other(monkeypatch, folder):
    begun = {}

    def resume(script, flags, monkeypatch):
        if script != "my_loop.py":
            monkeypatch.setattr(sys, "argv", [script])
            options = parse_options("", flags)
            assert not options.compare(begun.setdefault(options.run_dir, options.identity())), flags

    monkeypatch.setattr(sys.modules[__name__], "check_training", resume)
    for where, words in documented():
        if where in ("README.md", "common/README.md"):
            with monkeypatch.context() as shell:
                check(words, shell)
    assert len(begun) > 2


def test_a_documented_torchrun_over_a_range_of_machines_survives_a_late_join():
    ranges = [
        words
        for _, words in documented()
        if "torchrun" in words and re.search(r"nnodes=\d+:\d", " ".join(words))
    ]
    assert ranges
    for words in ranges:
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words[: words.index("torchrun")]


def test_enough_commands_were_found_to_be_checked():
    starts = {" ".join(words[:2]) for _, words in documented()}
    assert len(documented()) > 40
    assert {
        "python -m",
        "torchrun --nproc_per_node=2",
        "launch/local.sh --epochs",
        "python launch/store.py",
    } <= starts


# ---- the text -------------------------------------------------------------------------------------
@PAGE
def test_a_readme_is_short_and_what_it_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST[page.relative_to(ROOT).as_posix()]
    cut = [line for line in prose(text).splitlines() if line.count("`") % 2]
    assert not cut, "a command cut in two by the end of a line would not be checked"
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|sh|sbatch|txt|json|md|yml|yaml)|/))`", text):
        places = [folder / name for folder in (ROOT, page.parent)]
        assert name.startswith(MADE) or any(path.exists() for path in places), name
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        path = (page.parent / target).resolve() if target else page
        assert path.is_file(), target
        headings = re.findall(r"^#+ (.*)", prose(path.read_text(encoding="utf-8", errors="replace")), re.M)
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, anchor


def test_every_test_that_a_readme_names_exists_once():
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+_\w+_\w+)`", README + COMMON)
    assert len(named) > 10
    for name in named:
        assert len(re.findall(rf"^def {name}\(", code, re.MULTILINE)) == 1, name


def test_what_is_to_be_changed_is_in_the_file_that_is_named():
    named = re.findall(r"`(\w+)` in `([\w/]+\.py)`", section(COMMON, "To change ..., open ..."))
    assert len(named) > 8
    for name, path in named:
        code = (ROOT / "common" / path).read_text()
        assert re.search(rf"^ *(?:def |class )?{name}\b[ =:(]", code, re.MULTILINE), (name, path)


# ---- a user's first hour --------------------------------------------------------------------------
def train(jobs, folder, *words):
    return jobs.python("train_ddp.py", *words, cwd=folder).ends_with(0)


def own_code():
    """(the code of my_own.py, the flags that train with it), from the first page."""
    text = section(README, "The three scripts")
    (code,) = fenced(text, "python")
    (command,) = commands(fenced(text, "sh")[0])
    assert command[:2] == ["python", "train_ddp.py"]
    return code, command[2:]


def test_the_readmes_own_model_and_dataset_train_and_load_again(jobs, tmp_path):
    code, flags = own_code()
    (tmp_path / "my_own.py").write_text(code)
    train(jobs, tmp_path, *flags, "--max-steps", "30", "--no-tensorboard")
    last = rows(tmp_path / "runs/wide")[-1]
    assert last["val_acc"] > 0.8
    (accuracy,) = fork_ranks(1, accuracy_in_a_notebook, tmp_path, code)
    assert abs(accuracy - last["val_acc"]) < 1e-9


def accuracy_in_a_notebook(world, folder, code):
    """In a process of its own: its threads fork badly."""
    import os

    from common.models import load

    names = {}
    exec(code, names)
    os.chdir(folder)
    net = load("runs/wide")
    x, y = names["bright"]()[2:]
    with torch.no_grad():
        return (net(x).argmax(1) == y).double().mean().item()


def shape(line):
    return re.sub(r"[\d,]*\d", "N", re.sub(r"run \S+|life \S+|runs/\S+|, after .*", "", line))


def test_a_run_leaves_the_files_and_prints_the_lines_that_the_readme_shows(jobs, tmp_path):
    flags = "--run-dir run --log-every 1 --audit --model mlp --dataset random".split()
    printed = "".join(train(jobs, tmp_path, *flags, "--max-steps", steps) for steps in "23")
    shown = next(text for text in fenced(README, "") if "resuming" in text).splitlines()
    shapes = {shape(line) for line in shown if line.startswith(("resuming", "epoch", "step"))}
    assert len(shapes) >= 3 and shapes <= {shape(line) for line in printed.splitlines()}
    block = next(text for text in fenced(README, "") if text.startswith("runs/net-digits/"))
    names = set(re.findall(r"[\w.-]+", " ".join(re.findall(r"^ +([\w./-]+(?:, [\w./-]+)*)", block, re.M))))
    top = {path.name for path in (tmp_path / "run").iterdir()}
    assert top <= names, "the run has files that the README does not show"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o77 == 0 for path in (tmp_path / "run").rglob("*"))
