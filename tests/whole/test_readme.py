"""README.md and the files of launch/ say nothing that is not so: commands are parsed by what they start, or run."""
import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common.options import Options, parse_options

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAUNCHERS = {"launch/local.sh": {"--nproc"}, "launch/warm.py": {"--nproc", "--max-restarts"}}   # flags of their own


def fenced(text, language):
    """The contents of ```language blocks."""
    parts = re.split(r"^```(.*)\n", text, flags=re.MULTILINE)        # outside, language, inside, "", outside, ...
    return [inside for name, inside in zip(parts[1::4], parts[2::4], strict=True) if name == language]


def commands(lines):
    """The commands among lines of shell, as lists of words; comments are gone, continued lines are joined."""
    joined = re.sub(r"\\\\?\n\s*", " ", lines)
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def documented():
    """(where, command): README's shell blocks and the indented commands that open scripts and launch files."""
    found = [("README.md", words) for block in fenced(README, "sh") for words in commands(block)]
    prose = re.sub("```.*?```", "", README, flags=re.DOTALL)
    inline = re.findall(r"`((?:launch/|tests/run|torchrun|python|CUDA)[^`\n]* [^`\n]*)`", prose)
    found += [("README.md", shlex.split(text)) for text in inline]
    for path in [*ROOT.glob("train_*.py"), *ROOT.glob("launch/*.py"), ROOT / "common/checkpoint/__main__.py", ROOT / "common/ledger/__main__.py"]:  # noqa: E501
        doc = ast.get_docstring(ast.parse(path.read_text()), clean=False)
        found += [(path.name, words) for words in commands("\n".join(re.findall(r"^    .*", doc, re.MULTILINE)))]
    for path in [*ROOT.glob("launch/*.s*h"), ROOT / "tests/run.sh"]:
        text = "\n".join(re.findall(r"^#     (.*)", path.read_text(), re.MULTILINE))
        text = re.sub(r"  +\w.*", "", text)                         # what follows two spaces explains
        found += [(path.name, words) for words in commands(text)]
    return [(where, words) for where, words in found if not words[0].startswith("train_")]


def check_training(words, monkeypatch):
    """The script exists, and its own parser takes the flags."""
    monkeypatch.chdir(ROOT)
    assert (ROOT / words[0]).is_file(), words
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr("common.options.options._check_places", lambda opts: None)      # whose folders are not here
    flags = [text for text in words[1:] if text not in ("--help", "...")]
    assert isinstance(parse_options("", flags), Options)


def check(words, monkeypatch):
    """One command, by what it starts; a command that nothing here knows is a failure."""
    from torch.distributed.run import get_args_parser
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/")
    if program == "python" and words[1] == "-m":
        module, rest = words[2], words[3:]
        if module.startswith("common."):
            paths = [ROOT / f"{module.replace('.', '/')}{end}" for end in (".py", "/__main__.py")]
            path = next(filter(Path.is_file, paths), paths[0])
            assert path.is_file() and all(text in path.read_text() for text in rest if text.startswith("--")), words
        else:
            assert (ROOT / module.replace(".", "/")).exists(), words
        return
    if program == "python":
        program, words = words[1], words[1:]
    if program in ("torchrun", "launch/torchrun.py"):
        given = get_args_parser().parse_args(words[1:])
        if given.training_script.startswith("tests/bench/"):
            return check(["python", given.training_script, *given.training_script_args], monkeypatch)
        assert given.training_script in ("train_ddp.py", "train_mp.py"), words
        monkeypatch.setattr("common.options.options.world_size", lambda: int(given.nproc_per_node) if given.nproc_per_node.isdigit() else 1)  # noqa: E501
        check_training([given.training_script, *given.training_script_args], monkeypatch)
    elif program in LAUNCHERS:
        rest = words[1:]
        while flag := next((text for text in rest if text in LAUNCHERS[program]), None):
            at = rest.index(flag)
            rest = rest[:at] + rest[at + 2:]
        check_training(rest if rest and rest[0].startswith("train_") else ["train_ddp.py", *rest], monkeypatch)
    elif program.startswith("train_"):
        check_training(words, monkeypatch)
    elif program == "tests/run.sh":
        assert all((ROOT / text).exists() for text in words[1:] if text.startswith("tests/")), words
    elif program == "launch/store.py":
        assert len(words) == 2 and re.fullmatch(r"\S+:\w+", words[1]), words
    elif program.startswith("tests/bench/"):
        text = (ROOT / program).read_text()
        assert all(f'"{flag}"' in text for flag in words[1:] if flag.startswith("--")), words
    elif program == "sbatch":
        at = words.index("launch/slurm.sbatch")
        check_training(["train_ddp.py", *words[at + 1:]], monkeypatch)
    elif program == "pip":
        assert words[1:3] == ["install", "-r"] and (ROOT / words[3]).is_file()
    else:
        assert program in ("tensorboard",), f"no test knows this command: {shlex.join(words)}"


@pytest.mark.parametrize("where, words", documented(), ids=lambda value: shlex.join(value) if isinstance(value, list) else value)
def test_a_documented_command_is_understood_by_what_it_starts(where, words, monkeypatch):
    check(words, monkeypatch)


def test_a_documented_torchrun_over_a_range_of_machines_survives_a_late_join():
    ranges = [words for _, words in documented() if "torchrun" in words and re.search(r"nnodes=\d+:\d", " ".join(words))]
    assert ranges and all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words[:words.index("torchrun")] for words in ranges)


def test_enough_commands_were_found_to_be_checked():
    starts = [" ".join(words[:2]) for _, words in documented()]
    assert len(starts) > 30 and {"python -m", "torchrun --nproc_per_node=2", "launch/local.sh --epochs"} <= set(starts)


def test_files_that_the_readme_names_exist():
    made = ("my_", "options.json", "metrics.jsonl", "ledger.jsonl", "model.", "optimizer.", "state.json", "manifest.json")
    for name in re.findall(r"`([\w./-]+\.(?:py|sh|txt|json|md|yml))`", README):
        places = (ROOT, ROOT / "common", ROOT / "launch", ROOT / "tests")
        assert name.startswith(made) or any((place / name).is_file() for place in places), name


def test_every_launcher_is_named_in_the_readme():
    assert all(f"`{path.name}`" in README for path in (ROOT / "launch").iterdir() if path.is_file())


def test_every_test_that_the_readme_calls_a_proof_exists():
    rows = re.findall(r"`(tests/test_\w+\.py)`(?:: `(\w+)`)?", README)
    assert len(rows) > 6
    for path, name in rows:
        assert (ROOT / path).is_file() and f"def {name or 'test_'}" in (ROOT / path).read_text(), (path, name)


def test_every_table_row_of_the_guarantees_has_a_proof():
    table = README.partition("| guarantee |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) > 4 and all("`tests/" in row for row in table)


def test_the_exit_codes_in_the_readme_are_those_of_the_launcher():
    from importlib.util import module_from_spec, spec_from_file_location
    spec = spec_from_file_location("warm_agent", ROOT / "launch" / "warm.py")
    warm = module_from_spec(spec)
    spec.loader.exec_module(warm)
    said = README.partition("Exit codes:")[2].partition("\n\n")[0]
    assert {int(n) for n in re.findall(r"(?:^|· |\n)\s*(\d+) [a-z]", said)} == {0, *warm.FINAL, warm.STOPPED}


def test_the_readmes_own_model_and_dataset_train(tmp_path):
    for name, heading in (("my_model.py", "## Adding a model"), ("my_data.py", "## Adding a dataset")):
        code, = fenced(README.partition(heading)[2].partition("\n## ")[0], "python")
        assert len(code.splitlines()) <= 7
        (tmp_path / name).write_text(code)
    command, = commands(fenced(README.partition("## Adding a dataset")[2].partition("\n## ")[0], "sh")[0])
    assert command[:2] == ["python", "train_ddp.py"]
    done = subprocess.run([sys.executable, ROOT / "train_ddp.py", *command[2:], "--max-steps", "30", "--no-tensorboard"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    run, = (tmp_path / "runs").iterdir()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_acc"] > 0.8


def test_a_run_leaves_the_files_that_the_readme_shows(tmp_path):
    block = next(text for text in fenced(README, "") if text.startswith("runs/net-digits/"))
    names = re.findall(r"^ +([\w.-]+)", block, re.MULTILINE)
    flags = "--run-dir run --max-steps 2 --log-every 1 --audit --model mlp --dataset random".split()
    done = subprocess.run([sys.executable, ROOT / "train_ddp.py", *flags], cwd=tmp_path, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stdout + done.stderr
    made = {path.name for path in (tmp_path / "run").rglob("*")}
    assert {name for name in names if not name.startswith("step-")} <= made and any(name.startswith("step-") for name in made)
    top = {path.name for path in (tmp_path / "run").iterdir()}
    assert top == set(names) & top, "the run has files that the README does not show"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o77 == 0 for path in (tmp_path / "run").rglob("*"))
