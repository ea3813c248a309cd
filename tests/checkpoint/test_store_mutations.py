"""A test of the tests: each way to break the store, built into one of its functions, makes a test fail;
unbroken, they pass.

Every mutant lives in a forked child that imports the store anew. It is found in the code, not in the text: in
a function, an expression or a statement gives way to another one.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import signal
import sys
from pathlib import Path

import pytest
import ranks
from test_store_frozen import by_data

import common

DEADLINE = 100
HOUSE = Path(common.__file__).parent
MODULES = ["sealed", "world", "world.world", "checkpoint", "store", "rescue"] + [
    f"{room}.{path.stem}" for room in ("checkpoint", "store") for path in (HOUSE / room).glob("[a-z]*.py")
]
CRASH = "crash", "every_crash_state_leaves_the_old_checkpoint_or_the_new_one_whole"
BITS = "damage", "every_single_bit_of_every_file_falls_back_when_it_flips", 4
FROZEN = "frozen", "a_weight_that_moves_though_it_does_not_train_is_written", by_data
FSYNC = "faults", "a_failed_fsync_is_never_retried_on_the_same_file"
RETRIED = "faults", "the_last_save_is_retried_and_a_run_that_cannot_be_saved_does_not_end_well"
READS = "what_stays_unreadable_ends_the_start_and_is_neither_passed_over_nor_put_aside_nor_deleted"
RELAY = "ranks", "a_rank_that_receives_wrong_bytes_stays_with_the_others_and_all_take_the_one_before"
CLAIMS = "fence", "of_two_that_claim_at_the_same_time_one_owns_and_the_other_saves_nothing"
MOVED = "fence", "a_staging_that_was_moved_away_lets_nothing_through_at_any_point_of_a_save"
SWEPT = "fence", "a_rescue_under_way_is_waited_for_before_anything_is_swept"
DIFFER = "ranks", "replicas_that_differ_are_noticed_and_nothing_of_theirs_stays", "a buffer"

# {what is wrong: (function, what stands in it, what comes in its place, the test that must fail)}
MUTANTS = {
    # what is on the disk when it is said to be
    "a file is not synced": ("checkpoint.disk:new_file", "os.fsync(fd)", "None", CRASH),
    "the rename is not synced": (
        "checkpoint.writer:Writer._name",
        "sync_folder(self.root)",
        "None",
        CRASH,
    ),
    "written in place, without a rename": (
        "checkpoint.writer:Writer._aside",
        "return self.staging / f'{folder_name(step)}.{uuid.uuid4().hex[:12]}'",
        "return self.root / folder_name(step)",
        CRASH,
    ),
    "old ones go before the new one is written": (
        "checkpoint.writer:Writer._commit",
        "os.mkdir(aside, 0o700)",
        "os.mkdir(aside, 0o700), self.prune(-1, 1, 0, -1)",
        CRASH,
    ),
    "a failed fsync is overlooked": (
        "checkpoint.disk:new_file",
        "os.fsync(fd)",
        "with suppress(OSError):\n    os.fsync(fd)",
        (*FSYNC, 1),
    ),
    "a weight that moved is linked": (
        "checkpoint.writer:Writer._linked",
        "table == tensors.table_of(frozen, self._move)",
        "True",
        FROZEN,
    ),
    "what has shown damage is linked": (
        "checkpoint.writer:Writer.read_back",
        "self.may_link = False",
        "pass",
        ("frozen", "damage_of_the_one_file_is_found_by_the_next_save_and_made_good_by_the_one_after_it"),
    ),
    # what is believed
    "the hash is not compared": (
        "checkpoint.tensors:read_file",
        "digest.hexdigest() != stated",
        "False",
        BITS,
    ),
    "a thread's damage is not heard of": (
        "checkpoint.tensors:spread",
        "list(pool.map(act, items))",
        "pool.map(act, items)",
        BITS,
    ),
    "the seal is ignored": ("sealed:unsealed", "text + _seal(text) != data", "False", BITS),
    "what cannot be read is taken for damaged": (
        "checkpoint.disk:patient",
        "error.errno in WRONG",
        "True",
        ("faults", READS, "EIO"),
    ),
    "when all are damaged, it starts afresh": (
        "store.load:load_newest",
        "Loaded(steps=[*steps.values()])",
        "Loaded()",
        ("", "when_all_are_damaged_nothing_starts_afresh_by_itself"),
    ),
    "received bytes are not compared": (
        "checkpoint.reader:relay",
        "sha(data) == stated",
        "bool(sha(data))",
        RELAY,
    ),
    # who may write
    "a claim does not look at the name again": (
        "checkpoint.fence:Fence.claim",
        "not self.lock.is_ours()",
        "False",
        CLAIMS,
    ),
    "the fence is skipped": (
        "checkpoint.writer:Writer.check_staging",
        "self.staging.unlink()",
        "return",
        MOVED,
    ),
    "a rescue under way is swept": ("checkpoint.fence:Fence._sweep", "wait_for(lock)", "None", SWEPT),
    # what is saved
    "a failed save counts as saved": (
        "store.saver:Saver._note_failure",
        "self.saved = None",
        "pass",
        RETRIED,
    ),
    "half a step is rescued": (
        "store.saver:Saver.rescue",
        "raise state.spoiled",
        "pass",
        ("", "a_state_cut_in_two_is_never_saved"),
    ),
    "the best one is pruned": (
        "checkpoint.writer:Writer.prune",
        "best_of(choices).get('step')",
        "0",
        ("", "the_newest_ones_the_best_one_and_nothing_else_is_kept"),
    ),
    "what diverged stays": (
        "store.store:CheckpointStore.roll_back",
        "self.writer.put_aside(folder)",
        "None",
        DIFFER,
    ),
}
KILLERS = list({killer: killer for *_, killer in MUTANTS.values()})


class Swap(ast.NodeTransformer):
    """In a tree, what is written `old` gives way to `new`."""

    def __init__(self, old, new):
        self.old, self.new = (ast.parse(text).body[0] for text in (old, new))
        if isinstance(self.old, ast.Expr) and isinstance(self.new, ast.Expr):
            self.old, self.new = self.old.value, self.new.value
        self.count = 0

    def visit(self, node):
        if ast.dump(node) == ast.dump(self.old):
            self.count += 1
            return self.new
        return self.generic_visit(node)


class Mutating(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports the module of one function with `old` replaced by `new` in it."""

    def __init__(self, function, old, new):
        module, self.function = function.split(":")
        super().__init__(f"common.{module}", str(HOUSE / f"{module.replace('.', '/')}.py"))
        self.swap = Swap(old, new)

    def find_spec(self, fullname, path, target=None):
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname):
        tree = function = ast.parse(self.get_data(self.path))
        for name in self.function.split("."):
            function = next(node for node in function.body if getattr(node, "name", "") == name)
        self.swap.visit(function)
        assert self.swap.count == 1, f"{self.swap.count} times: {ast.unparse(self.swap.old)}"
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


def run(killer, folder, mutant=None):
    """True if the test passes in a child with this mutant (or with none)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setpgid(0, 0)
            signal.alarm(DEADLINE)
            tests = [name for name in sys.modules if name.startswith("test_store")]
            for name in [*(f"common.{module}" for module in MODULES), "stores", *tests]:
                parent, _, leaf = name.rpartition(".")
                # a package keeps its modules as attributes too
                vars(sys.modules.get(parent, sys)).pop(leaf, None)
                sys.modules.pop(name, None)
            if mutant:
                sys.meta_path.insert(0, Mutating(*mutant[:3]))
                importlib.import_module(sys.meta_path[0].name)
            module = importlib.import_module("_".join(filter(None, ("test_store", killer[0]))))
            test = getattr(module, f"test_{killer[1]}")
            patch = pytest.MonkeyPatch()
            fixtures = {"tmp_path": folder, "run": folder / "run", "monkeypatch": patch, "every": 29}
            names = inspect.signature(test).parameters
            given = dict(zip([name for name in names if name not in fixtures], killer[2:], strict=True))
            code = 2
            test(**{name: value for name, value in fixtures.items() if name in names}, **given)
            code = 0
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}"[:2000].encode())
            code = 1 if code == 2 else code
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode(errors="replace")
    code = ranks._end(pid)
    assert code in (0, 1), f"the child ended with {code}: {said}"
    return code == 0, said


@pytest.mark.parametrize("killer", KILLERS, ids=lambda killer: "-".join(str(k) for k in killer[1:])[:60])
def test_unbroken_the_tests_pass_here_too(tmp_path, killer):
    passed, said = run(killer, tmp_path)
    assert passed, said


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_store_is_caught(tmp_path, name):
    mutant = MUTANTS[name]
    assert not run(mutant[3], tmp_path, mutant)[0]
