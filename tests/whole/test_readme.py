"""No README and no file of launch/ says what is not so: commands are parsed by what they start, or run."""
import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import fork_ranks

from common.options import Options, parse_options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md",
         *sorted(p for name in ("common", "launch", "tests") for p in (ROOT / name).rglob("README.md")),
         *sorted(ROOT.glob(".github/*.md"))]
README, COMMON, LAUNCH = [(ROOT / name / "README.md").read_text(encoding="utf-8")
                          for name in ("", "common", "launch")]
# flags of their own
LAUNCHERS = {"launch/local.sh": {"--nproc"}, "launch/ssh.sh": set()}
MADE = ("my_", "options.json", "metrics.jsonl", "ledger.jsonl", "status.json", "model.", "optimizer.",
        "state.json", "manifest.json", "tb/",
        "audit/")  # by a reader or by a run
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def fenced(text, language):
    """The contents of ```language blocks."""
    parts = re.split(r"^```(.*)\n", text, flags=re.MULTILINE)  # outside, language, inside, "", outside, ...
    return [inside for name, inside in zip(parts[1::4], parts[2::4], strict=True) if name == language]


def prose(text):
    return re.sub("^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def section(text, heading):
    assert f"\n## {heading}\n" in text, heading
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text, first):
    """The cells of the table whose head begins with `first`."""
    table = text.partition(f"| {first}")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) > 4, first
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]


def commands(lines):
    """The commands among lines of shell, as lists of words; comments are gone, continued lines are joined."""
    joined = re.sub(r"\\\\?\n\s*", " ", lines)
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def documented():
    """(where, command): the READMEs' shell blocks and inline commands, and those that docstrings and launch
    files show.
    """
    found = []
    for page in PAGES:
        text, where = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
        found += [(where, words) for block in fenced(text, "sh") for words in commands(block)]
        inline = re.findall(r"`((?:launch/|tests/run|torchrun|sbatch|pip|python|CUDA)[^`\n]* [^`\n]*)`",
                            prose(text))
        found += [(where, shlex.split(command)) for command in inline]
    for path in [*ROOT.glob("train_*.py"), *ROOT.glob("launch/*.py"), *(ROOT / "common").rglob("*.py")]:
        # there are pictures too
        shown = r"^    (?:python|torchrun) .*" if ROOT / "common" in path.parents else r"^    .*"
        doc = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        found += [(path.name, words) for words in commands("\n".join(re.findall(shown, doc, re.MULTILINE)))]
    for path in [*ROOT.glob("launch/*.s*h"), ROOT / "tests/run.sh"]:
        text = "\n".join(re.findall(r"^#     (.*)", path.read_text(), re.MULTILINE))
        text = re.sub(r"  +\w.*", "", text)  # what follows two spaces explains
        found += [(path.name, words) for words in commands(text)]
    return [(where, words) for where, words in found if not words[0].startswith("train_")]


def check_training(words, monkeypatch):
    """The script exists, and its own parser takes the flags."""
    assert (ROOT / words[0]).is_file(), words
    monkeypatch.setattr(sys, "argv", words)
    flags = [text for text in words[1:] if text not in ("--help", "...")]
    assert isinstance(parse_options("", flags), Options)


def check(words, monkeypatch):
    """One command, by what it starts; a command that nothing here knows is a failure."""
    from torch.distributed.run import get_args_parser
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, value = words[0].partition("=")
        monkeypatch.setenv(name, value.replace("HOST", "127.0.0.1"))
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/")
    if program == "python" and words[1] == "-m":
        base = ROOT / words[2].replace(".", "/")
        path = next(path for path in (base.with_suffix(".py"), base / "__main__.py") if path.is_file())
        assert all(text in path.read_text() for text in words[3:] if text.startswith("--")), words
        return
    if program == "python":
        program, words = words[1], words[1:]
    if program in ("torchrun", "launch/torchrun.py", "launch/doctor.py"):
        words += ["train_ddp.py"] if len(words) == 1 else []
        agent = get_args_parser().parse_args(words[1:])
        if agent.training_script.startswith("tests/bench/"):
            return check(["python", agent.training_script, *agent.training_script_args], monkeypatch)
        assert agent.training_script in ("train_ddp.py", "train_mp.py"), words
        size = agent.nproc_per_node if agent.nproc_per_node.isdigit() else "1"
        for name, value in {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        check_training([agent.training_script, *agent.training_script_args], monkeypatch)
    elif program == "launch/drill.sh":
        assert len(words) < 3 and not words[-1].startswith("-"), words
    elif program in LAUNCHERS:
        rest = [text for text in words[1:] if text != "--check"][program == "launch/ssh.sh":]
        while flag := next((text for text in rest if text in LAUNCHERS[program]), None):
            at = rest.index(flag)
            rest = rest[:at] + rest[at + 2:]
        if rest[:1] != ["my_loop.py"]:  # test_elastic.py runs it
            check_training(rest if rest and rest[0].startswith("train_") else ["train_ddp.py", *rest],
                           monkeypatch)
    elif program.startswith("train_"):
        check_training(words, monkeypatch)
    elif program == "tests/run.sh":
        assert all((ROOT / text).exists() for text in words[1:] if text.startswith("tests/")), words
    elif program == "launch/store.py":
        assert len(words) == 2 and re.fullmatch(r"\S+:\w+", words[1]), words
    elif program == "launch/notice.py":
        rest = words[1:]
        while rest and rest[0].startswith("--"):
            assert f'"{rest[0]}"' in (ROOT / program).read_text(), words
            rest = rest[2:]
        if rest:
            check(rest, monkeypatch)
    elif program.startswith("tests/bench/"):
        text = (ROOT / program).read_text()
        assert all(f'"{flag}"' in text for flag in words[1:] if flag.startswith("--")), words
    elif program == "sbatch":
        at = words.index("launch/slurm.sbatch")
        check_training(["train_ddp.py", *words[at + 1:]], monkeypatch)
    elif program in ("docker", "kubectl"):
        assert (ROOT / words[words.index("-f") + 1]).is_file(), words
    elif program == "pip":
        assert words[1] == "install" and (words[2] != "-r" or (ROOT / words[3]).is_file())
    else:
        assert program in ("tensorboard", "rm"), f"no test knows this command: {shlex.join(words)}"


@pytest.mark.parametrize("where, words", documented(),
                         ids=lambda value: shlex.join(value) if isinstance(value, list) else value)
def test_a_documented_command_is_understood_by_what_it_starts(where, words, monkeypatch, tmp_path):
    (tmp_path / "runs/wide").mkdir(parents=True)
    for part in ("train", "val"):  # data is looked for before torch is imported
        (tmp_path / "data" / part).mkdir(parents=True)
        (tmp_path / "data" / f"{part}.bin").touch()
        (tmp_path / "data" / f"{part}-0000.tar").touch()
    monkeypatch.chdir(tmp_path)
    check(words, monkeypatch)


def test_a_documented_torchrun_over_a_range_of_machines_survives_a_late_join():
    ranges = [words for _,
              words in documented() if "torchrun" in words and re.search(r"nnodes=\d+:\d", " ".join(words))]
    assert ranges and all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words[:words.index("torchrun")]
                          for words in ranges)


def test_enough_commands_were_found_to_be_checked():
    starts = [" ".join(words[:2]) for _, words in documented()]
    assert len(PAGES) >= 7 and len(starts) > 50
    assert {"python -m", "torchrun --nproc_per_node=2", "launch/local.sh --epochs",
            "python launch/store.py"} <= set(starts)


@PAGE
def test_no_inline_code_is_cut_in_two_by_the_end_of_a_line(page):
    cut = [line for line in prose(page.read_text(encoding="utf-8")).splitlines() if line.count("`") % 2]
    assert not cut, "a command cut in two would not be checked"


@PAGE
def test_files_and_folders_that_a_readme_names_exist(page):
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|sh|sbatch|txt|json|md|yml)|/))`",
                           page.read_text(encoding="utf-8")):
        places = [place / name for place in (ROOT, page.parent)]
        assert name.startswith(MADE) or any(p.is_dir() if name.endswith("/") else p.is_file()
                                            for p in places), name


def test_what_is_to_be_changed_is_in_the_file_that_is_named():
    named = re.findall(r"`(\w+)` (?:and `(\w+)` )?in `([\w/]+\.py)`", section(COMMON, "I want to change ..."))
    assert len(named) > 6
    for *names, path in named:
        code = (ROOT / "common" / path).read_text()
        assert re.search(rf"^ *(?:def |class )?{names[0]}\b[ =:(]", code, re.MULTILINE), (names, path)


@PAGE
def test_links_of_a_readme_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        assert path.is_file(), target
        headings = re.findall(r"^#+ (.*)", prose(path.read_text(encoding="utf-8")), re.MULTILINE)
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
                                        for h in headings], anchor


def test_every_guarantee_has_tests_that_exist_and_its_how():
    code = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    told = []
    for page in (README, COMMON):
        names = [re.findall(r"`(test_\w+)`", line[-1]) for line in rows(page, "guarantee |")]
        assert all(names)
        told.append(sorted(name for row in names for name in row))
    assert told[0] == told[1], "README.md says what is guaranteed, common/README.md how"
    for name in [*told[0], *re.findall(r"`(test_\w+)`", COMMON)]:
        assert len(re.findall(rf"^def {name}\(", code, re.MULTILINE)) == 1, name


def test_the_readmes_name_the_rooms_of_common_and_no_other():
    rooms = {path.stem for path in (ROOT / "common").iterdir()
             if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}
    where = section(README, "Where things are")
    assert rooms == {*re.findall(r"^\| `(\w+)` \|", where, re.MULTILINE),
                     *re.findall(r"`common/(\w+)\.py`", where)}
    picture = re.sub(r"\(.*?\)", "", COMMON.split("\n\n")[1]).partition("---\n")[2]
    assert rooms == {name.removesuffix(".py") for name in picture.split()}


def test_the_exit_codes_in_the_readmes_are_those_of_the_launcher(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")
    workers = import_module("workers")
    codes = {0, *workers.FINAL, workers.STOPPED}
    said = README.partition("Exit codes:")[2].partition("\n\n")[0]
    assert {int(n) for n in re.findall(r"(?:^|· |\n)\s*(\d+) [a-z]", said)} == codes | {1}
    assert {int(cells[0]) for cells in rows(LAUNCH, "code |")} == codes | {1}


def test_every_message_in_the_table_of_errors_is_one_that_the_code_prints():
    strings = ""
    for path in [*(ROOT / "common").rglob("*.py"), *ROOT.glob("launch/*.py")]:
        constants = [node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                     if isinstance(node, ast.Constant)]
        strings += "\n".join(text for text in constants if isinstance(text, str))
    wrong = []
    for cells in rows(section(LAUNCH, "Errors and their mends"), "you read |"):
        for message in re.findall("`(.*?)`", cells[0]):
            if not message.startswith(("Rendezvous", "DistStore")):  # torch's own
                parts = re.split(r"\.\.\.|\S*(?:\d|HOST|JOB)\S*|\b[A-Z]\b|--\S*|\S*=|SIG\w+|: |error",
                                 message)
                wrong += [(message, part) for part in map(str.strip, parts) if len(part) > 4
                          and part not in strings]
    assert not wrong


def test_every_launcher_and_every_setting_of_torchrun_is_explained():
    files = {path.name for path in (ROOT / "launch").iterdir() if path.is_file()} - {"README.md"}
    assert files <= set(re.findall(r"`(?:launch/)?([\w.]+)`", LAUNCH))
    tree = ast.parse((ROOT / "launch/torchrun.py").read_text())
    settings = next(n.value for n in tree.body if ast.unparse(n).startswith("SETTINGS ="))
    table = section(LAUNCH, "What torchrun.py sets, and why")
    for key, value in zip(settings.keys, settings.values, strict=True):
        assert key.value in table, key.value
        assert all(part in table for part in (value.value.split(",") if isinstance(value, ast.Constant)
                                              else ())), value.value


def test_the_private_names_of_torch_that_are_used_exist_and_are_listed():
    said = set(re.findall(r"`(?:[\w.]+\.)?(_\w+)`", section(COMMON, "Private names of torch")))
    code = "\n".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    assert said == {name for name in said if re.search(rf"\b{name}\b", code)}
    assert set(re.findall(r"\btorch\.(_[a-z]\w*)",
                          code)) <= said, "list it, so that an upgrade of torch is looked at"
    vision = pytest.importorskip("torchvision")
    places = (torch, torch.amp.GradScaler, torch.nn.modules.batchnorm, vision.models.VisionTransformer,
              torch.UntypedStorage)
    loader = inspect.getsource(torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    assert not [name for name in said if not any(hasattr(place, name) for place in places)
                and f"self.{name} " not in loader]


def test_the_readmes_own_model_and_dataset_train(tmp_path):
    text = section(README, "Your own model, your own data")
    code, = fenced(text, "python")
    assert len(code.splitlines()) <= 12
    (tmp_path / "my_own.py").write_text(code)
    command, = commands(fenced(text, "sh")[0])
    assert command[:2] == ["python", "train_ddp.py"]
    done = subprocess.run([sys.executable, ROOT / "train_ddp.py", *command[2:], "--max-steps", "30",
                           "--no-tensorboard"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    run, = (tmp_path / "runs").iterdir()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_acc"] > 0.8


def test_the_commands_that_use_a_result_do_what_is_said_of_them(jobs, monkeypatch, capsys):
    monkeypatch.chdir(jobs.folder)
    first = section(README, "Your own model, your own data")
    own, = fenced(first, "python")
    other = "\n\ndef other():\n    x, y, *test = bright()\n    return x, y, *[part[:100] for part in test]\n"
    Path("my_own.py").write_text(own + other)
    text = section(COMMON, "Using the result")
    for words in commands("".join(fenced(first, "sh") + fenced(text, "sh"))):
        if words[1] == "train_ddp.py":
            job = jobs.python("train_ddp.py", *words[2:], "--epochs=2", "--no-tensorboard")
            assert job.wait() == 0, job.output
        else:
            assert words[:2] == ["python", "-m"]
            assert import_module(f"{words[2]}.__main__").main(words[3:]) in (0, None)
    assert re.match(r"runs/wide/checkpoints/step-\d+\nwide.safetensors: ", capsys.readouterr().out)
    assert fork_ranks(1, in_a_notebook, own + fenced(text, "python")[0]) == [(True, True)]


def in_a_notebook(world, code):
    """(as accurate as the best evaluation that was logged, exported the same): its threads fork badly."""
    names = {"SimpleNamespace": SimpleNamespace, "safetensors": __import__("safetensors.torch")}
    exec(code, names)
    x, y = names["bright"]()[2:]
    told = [json.loads(line) for line in open("runs/wide/metrics.jsonl")]
    best = max(line["val_acc"] for line in told if "val_acc" in line)
    accuracy = (names["net"](x).argmax(1) == y).double().mean().item()
    return abs(accuracy - best) < 1e-9, torch.equal(names["program"].module()(x[:1]), names["net"](x[:1]))


def shape(line):
    return re.sub(r"[\d,]*\d", "N", re.sub(r"run \S+|life \S+", "", line))


def test_a_run_leaves_the_files_and_prints_the_lines_that_the_readme_shows(tmp_path):
    block = next(text for text in fenced(README, "") if text.startswith("runs/net-digits/"))
    names = re.findall(r"[\w.-]+", " ".join(re.findall(r"^ +(\S+(?: \S+)*)", block, re.MULTILINE)))
    flags = "--run-dir run --log-every 1 --audit --model mlp --dataset random".split()
    printed = ""
    for steps in ("2", "3"):  # the second one resumes
        done = subprocess.run([sys.executable, ROOT / "train_ddp.py", *flags, "--max-steps", steps],
                              cwd=tmp_path,
                              capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "leaked" not in done.stderr, done.stdout + done.stderr
        printed += done.stdout
    shown = next(text for text in fenced(README, "") if text.startswith("run runs/net-digits")).splitlines()
    shapes = {shape(line) for line in shown if line.startswith(("resuming", "epoch", "step"))}
    assert len(shapes) == 3 and shapes <= {shape(line) for line in printed.splitlines()}
    code = "".join(path.read_text() for room in ("common", "launch") for path in (ROOT / room).rglob("*.py"))
    for words in ("stopped on ", "was killed by ", " by rank "):
        assert words in code and words in "\n".join(shown), words
    made = {path.name for path in (tmp_path / "run").rglob("*")}
    assert {name for name in names if not name.startswith("step-")} <= made and any(name.startswith("step-")
                                                                                    for name in made)
    top = {path.name for path in (tmp_path / "run").iterdir()}
    assert top == set(names) & top, "the run has files that the README does not show"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o77 == 0 for path in (tmp_path / "run").rglob("*"))
