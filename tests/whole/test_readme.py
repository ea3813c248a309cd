"""No README and no file of launch/ says what is not so: its commands are run, or their flags are parsed."""

import re

import pytest
from jobs import ROOT
from torch.distributed.run import get_args_parser

from common.options import parse_options

PAGES = [ROOT / "README.md", *(ROOT / name / "README.md" for name in ("common", "launch", "tests"))]
PAGES += [ROOT / ".github/SECURITY.md", ROOT / ".github/CONTRIBUTING.md"]
README, COMMON, *_ = (page.read_text(encoding="utf-8") for page in PAGES)
LONGEST = {".": 140, "common": 260, "launch": 130, "tests": 80, ".github": 15}  # lines
# By a reader or by a run.
MADE = "my_ options. metrics. ledger. model. optimizer. state. manifest. tb/ audit/ control/"
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
FLAGS = r"((?: -[\w-]+(?:[= ][\w.:/,]+)?)*)"
SCRIPT = r"(?:train_(\w+)\.py|launch/local\.sh(?! -m)(?: my_loop\.py)?|launch/ssh\.sh [\w,]+|slurm\.sbatch)"
TRAINING = rf"(?:nproc_per_node=(\d+) [^\n`]*?)?{SCRIPT}{FLAGS}"
PROGRAM = r"(?:python|local\.sh) (?:-m )?((?:common|tests)[\w./]+)((?: [\w./,:=-]+)*)"
TORCHRUN = r"(\S*) ?torchrun(\.py)?( --n\w+=\S+(?: --?\S+)*)"


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


# ---- commands -------------------------------------------------------------------------------------
def shown(pattern, paths=()):
    """What the groups of a pattern match in the READMEs, the scripts, launch/ and common/, or in these."""
    everywhere = [*PAGES, *ROOT.glob("train_*.py"), *ROOT.glob("launch/*.*"), *ROOT.glob("common/**/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths or everywhere)
    joined = re.sub(r" *\\\\?\n[\s#]*", " ", text)  # lines that a backslash continues
    found = dict.fromkeys(re.findall(pattern, joined))
    assert len(found) > 9, found
    return found


def test_the_flags_of_each_training_that_is_shown_are_taken_and_resume_what_the_same_folder_holds(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("os.access", lambda *_: True)  # not everybody may write to /shared
    for path in (
        "my_own.py",
        "my.py",
        "my_llama.py",
        "F",
        "data/train.bin",
        "data/val.bin",
        "data/train/x",
        "data/val/x",
        "RUN/x",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    begun = {}
    typed_one_after_the_other = shown(TRAINING, PAGES[:2])
    for processes, script, flags in shown(TRAINING):
        words = re.sub(r" --nproc \d+| --help| --fork.*", "", flags).split()
        options = parse_options("", words, script or "ddp", int(processes or 0))
        if (processes, script, flags) in typed_one_after_the_other:
            assert not options.compare(begun.setdefault(options.run_dir, options.identity())), flags


def test_a_program_that_is_shown_has_the_flags():
    for name, words in shown(PROGRAM):
        base = ROOT / name.removesuffix(".py").replace(".", "/")
        path = base / "__main__.py" if base.is_dir() else base.with_suffix(".py")
        text = path.read_text()
        behind = re.search(r"see extras/(\w+)\.py", text)
        if behind:
            text = (ROOT / f"common/extras/{behind[1]}.py").read_text()
        for flag in re.findall(r"--(\w+)", words):
            assert f'"--{flag}"' in text or f" {flag}=" in text, (name, flag)


def test_torchrun_takes_what_is_shown_and_over_a_range_of_machines_survives_a_late_join():
    for variable, ours, flags in shown(TORCHRUN):
        get_args_parser().parse_args([*flags.split(), "script.py"])
        assert ours or "nnodes=1:" not in flags or variable == "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


# ---- the text -------------------------------------------------------------------------------------
@PAGE
def test_a_readme_is_short_and_what_it_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST[page.relative_to(ROOT).parent.as_posix()]
    cut = [line for line in prose(text).splitlines() if line.count("`") % 2]
    assert not cut, "a command cut in two by the end of a line would not be checked"
    names = re.findall(r"`([\w./-]+(?:\.(?:py|sh|sbatch|txt|json|md|yml|yaml)|/))`", text)
    for name in names + re.findall(r"(?: -f|tests/run\.sh) ([\w./]+)", text):
        places = [folder / name for folder in (ROOT, page.parent)]
        assert name.startswith(tuple(MADE.split())) or any(path.exists() for path in places), name
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


def test_the_page_shows_the_campaign_whose_table_is_kept():
    """`python -m tests.chaos --table tests/chaos/last.md` writes it: copy its first line."""
    line, *table = (ROOT / "tests/chaos/last.md").read_text(encoding="utf-8").splitlines()
    assert README.count(line) == 1
    assert "| steps lost that a survivor had finished | 0 |" in table


# ---- a user's first hour --------------------------------------------------------------------------
def test_a_run_leaves_the_files_that_the_readme_shows(jobs, tmp_path, run):
    flags = "--run-dir run --log-every 1 --audit --model mlp --dataset random".split()
    jobs.python("train_ddp.py", *flags, "--max-steps=2", cwd=tmp_path).ends_with(0)
    block = next(text for text in fenced(README, "") if text.startswith("runs/net-digits/"))
    names = set(re.findall(r"[\w.-]+", " ".join(re.findall(r"^ +([\w./-]+(?:, [\w./-]+)*)", block, re.M))))
    top = {path.name for path in run.iterdir()}
    assert top <= names, "the run has files that the README does not show"
    assert run.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o77 == 0 for path in run.rglob("*"))
