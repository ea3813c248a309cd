"""The rules of the house, of which a careless edit breaks one without any other test noticing."""

import ast
import functools
import importlib
import inspect
import io
import os
import re
import sys
import tokenize
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from jobs import ROOT, ran

HOUSE = ROOT / "common"
SCRIPTS = sorted(ROOT.glob("train_*.py"))
MAP = ast.get_docstring(ast.parse((HOUSE / "__init__.py").read_text(encoding="utf-8")), clean=False)
# Each paragraph of the map is a floor, the top one first: {room: how high it is}.
FLOORS = [
    rooms for part in MAP.split("\n\n") if (rooms := re.findall(r"^    (\w+)  +\S", part, re.MULTILINE))
]
HEIGHT = {room: -number for number, floor in enumerate(FLOORS) for room in floor}
FILES = sorted(path for path in HOUSE.rglob("*.py") if path != HOUSE / "__init__.py")
TORCHLESS = ("common", "common.place", "common.errors", "common.options", "common.ledger")
MOST_NAMES = 20  # that one door hands out

# These alone say torch.distributed, and these alone read os.environ.
COLLECTIVE = {"world/world", "world/rendezvous", "training/replicas", "extras/bits", "extras/gpus"}
ENVIRON = {"place", "errors", "world/world", "sealed", "extras/rehearsed", "extras/gpus"}
PRICES = {  # of what a plain training imports, by room, in code tokens
    "training": 7750,
    "checkpoint": 6520,
    "options": 4390,
    "store": 3720,
    "rescue": 3350,
    "elastic": 3010,
    "ledger": 2980,
    "world": 2770,
    "data": 2330,
    "errors": 1270,
    "place": 1160,
    "sampler": 1120,
    "story": 850,
    "models": 610,
    "sealed": 350,
    "device": 270,
    "torch_names": 190,
    "__init__": 20,
}
TOP_LEVEL = "LICENSE README.md common launch requirements.txt tests train_ddp.py train_dp.py train_mp.py"
MADE_BY_USE = {"runs", "data", "__pycache__"}
A_ROOM = pytest.mark.parametrize("room", [room for room in HEIGHT if (HOUSE / room).is_dir()])


def place(path):
    """world/world for common/world/world.py"""
    return path.relative_to(HOUSE).with_suffix("").as_posix()


def room_of(path):
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path):
    """(module, name) of every import in a file, also inside functions and for types alone; the name is empty
    for `import module`.
    """
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found += ((node.module, alias.name) for alias in node.names)
    return found


def door(room):
    """{name: thing} of what a room hands out."""
    inside = vars(importlib.import_module(f"common.{room}"))
    public = [name for name in inside if not name.startswith("_")]
    return {name: inside[name] for name in public if not inspect.ismodule(inside[name])}


def test_the_map_lists_every_room_once_and_this_test_sees_its_files():
    listed = sorted(room for floor in FLOORS for room in floor)
    assert listed == sorted({room_of(path) for path in FILES}), "mend the map in common/__init__.py"
    assert len(FILES) > 30, "a glob that finds nothing proves nothing"


@pytest.mark.parametrize("path", [*FILES, *SCRIPTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_room_uses_the_floors_below_it_through_their_doors_and_so_does_a_script(path):
    own = room_of(path) if path in FILES else "the top"
    for module, name in imports(path):
        head, _, rest = module.partition(".")
        assert not head.startswith(("train_", "launch", "tests")), f"{path} imports {module}"
        if head != "common":
            continue
        room = rest.partition(".")[0] or name
        if path in FILES and room == room_of(path):
            assert module != f"common.{own}" or path.parent == HOUSE, (
                "inside a room nobody comes in by the door"
            )
            continue
        assert HEIGHT[room] < HEIGHT.get(own, 1), (
            f"{own} imports {room}: a room uses the floors below it only"
        )
        if room == "extras":  # it has no door: each file is one extra
            continue
        assert module == f"common.{room}" and name in door(room), (
            f"{module}.{name} is not handed out by the door of {room}"
        )


@A_ROOM
def test_a_door_hands_out_little_and_only_what_somebody_outside_takes(room):
    taken = set()
    for path in [*FILES, *SCRIPTS, *ROOT.glob("launch/*.py"), *(ROOT / "tests").rglob("*.py")]:
        inside = path.is_relative_to(HOUSE / room) or path.is_relative_to(ROOT / "tests" / room)
        taken |= {name for module, name in imports(path) if module == f"common.{room}" and not inside}
    for page in (ROOT / "README.md", HOUSE / "README.md"):
        taken |= {*re.findall(rf"from common.{room} import (\w+)", page.read_text(encoding="utf-8"))}
    handed_out = door(room).keys()
    assert handed_out <= taken, f"nobody outside of {room} takes {handed_out - taken}"
    assert len(handed_out) <= MOST_NAMES
    body = tree_of(HOUSE / room / "__init__.py").body
    assert all(isinstance(node, ast.Expr | ast.ImportFrom) for node in body), "a door only hands out"
    assert all(module.startswith(f"common.{room}") for module, _ in imports(HOUSE / room / "__init__.py"))


@A_ROOM
def test_no_circle_inside_a_room(room):
    files = [path for path in FILES if room_of(path) == room and path.stem != "__init__"]
    arrows = {
        place(path): {
            module[7:].replace(".", "/")
            for module, _ in imports(path)
            if module.startswith(f"common.{room}.")
        }
        for path in files
    }
    assert len(list(TopologicalSorter(arrows).static_order())) >= len(files)


@pytest.mark.parametrize("path", FILES, ids=place)
def test_only_who_must_says_torch_distributed_and_looks_at_arguments_or_environment(path):
    dotted = {ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    dotted |= {module for module, _ in imports(path)}
    if place(path) not in COLLECTIVE:
        assert not [name for name in dotted if name.startswith("torch.distributed")]
    if place(path) not in ("options/parser", "options/user"):
        assert "sys.argv" not in dotted
    if place(path) not in ENVIRON:
        assert not dotted & {"os.environ", "os.getenv"}


PLAIN = "train_ddp.py --model net --dataset digits --max-steps 2 --eval-every 0 --run-dir"
IMPORTED = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def test_a_plain_training_imports_no_extra_and_each_room_costs_what_is_written_here(tmp_path):
    """Who makes a room dearer changes a line here, and a reader sees the price: code tokens, as imported."""
    code = f"{IMPORTED}; print([m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'common'])"
    done = ran(sys.executable, "-c", code, *PLAIN.split(), tmp_path / "run", cwd=ROOT)
    prices = Counter()
    for file in ast.literal_eval(done.stdout.splitlines()[-1]):
        prices[room_of(Path(file))] += tokens_of(Path(file))
    print(f"a plain training imports {prices.total():,} tokens: {dict(prices)}")
    assert "extras" not in prices
    dearer = {room: price for room, price in prices.items() if price > PRICES.get(room, 0)}
    cheaper = {room: price for room, price in PRICES.items() if price > prices[room] + 100}
    assert not dearer and not cheaper, f"mend PRICES: it is now {dict(prices)}"


def tokens_of(path):
    """How much code there is to read: no comment, no docstring, no line end."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    code = [token for token in tokens if token.string.strip() and token.type != tokenize.COMMENT]
    return sum(not token.line.strip().startswith('"""') for token in code)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_the_same_on_each_rank_and_says_where_the_words_are_that_a_learner_looks_for(path):
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree_of(path))}
    assert not names & {"rank", "local_rank", "node"}, "let common/ be quiet on the other ranks"
    assert not [module for module, _ in imports(path) if module.startswith("torch.distributed")]
    text = path.read_text(encoding="utf-8")
    loop = text[text.index("for batch in") :].splitlines()[:30]
    assert any("run.step(" in line for line in loop)
    note = " ".join(re.findall("^# (.*)", text, re.MULTILINE))
    named = dict(re.findall(r"([\w.]+)(?:\? It is)? in (common/[\w/]+\.py)", note))
    assert {"DistributedDataParallel", "nn.DataParallel", "backward", "set_epoch", "RANK"} == {*named}
    for word, file in named.items():
        assert re.search(rf"\b{word.removeprefix('nn.')}\b", (ROOT / file).read_text(encoding="utf-8")), word


def test_options_and_what_they_need_import_without_torch_or_numpy():
    code = f"import sys, {', '.join(TORCHLESS)}; print({{'torch', 'numpy', 'tqdm'}} & {{*sys.modules}})"
    done = ran(sys.executable, "-c", code)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_top_level_holds_what_was_agreed_on():
    there = {name for name in os.listdir(ROOT) if not name.startswith(".")} - MADE_BY_USE
    assert there == {*TOP_LEVEL.split()}, "what is added here is agreed on in TOP_LEVEL, or goes to .github/"


def test_no_file_names_a_place_of_one_machine():
    homes = "/(" + "|".join(("work", "home", "root", "Users", "tmp/team")) + ")/"
    assert not ran("git", "grep", "--untracked", "-InE", homes).stdout


@pytest.mark.parametrize("words", ["check --output-format concise", "format --diff"])
def test_ruff_finds_nothing(words):
    pytest.importorskip("ruff")
    done = ran(sys.executable, "-m", "ruff", *words.split(), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
