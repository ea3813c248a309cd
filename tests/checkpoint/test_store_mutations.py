"""A test of the tests: each way to break the store, built into one of its functions, makes a test fail;
unbroken, they pass.

Every mutant lives in a forked child: in the source of a function a few words give way to others, and the
function gets the code of that.
"""

import importlib
import inspect
import operator
import os
import signal
import textwrap

import pytest
import ranks
from test_store_frozen import by_numpy

DEADLINE = 100
CRASH = "crash", "every_crash_state_leaves_the_old_checkpoint_or_the_new_one_whole"
BITS = "damage", "every_single_bit_of_every_file_falls_back_when_it_flips", 4
FROZEN = "frozen", "a_weight_that_moves_though_it_does_not_train_is_written", by_numpy
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
        'self.staging / f"{folder_name(step)}.{uuid.uuid4().hex[:12]}"',
        "self.root / folder_name(step)",
        CRASH,
    ),
    "old ones go before the new one is written": (
        "checkpoint.writer:Writer._commit",
        "os.mkdir(aside, 0o700)",
        "os.mkdir(aside, 0o700), self.prune(-1, Options(keep=1, keep_every=0), -1)",
        CRASH,
    ),
    "a failed fsync is overlooked": (
        "checkpoint.disk:new_file",
        "os.fsync(fd)",
        "with suppress(OSError): os.fsync(fd)",
        (*FSYNC, 1),
    ),
    "a weight that moved is linked": (
        "checkpoint.writer:Writer._linked",
        "table == tensors.table_of(frozen)",
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
        "store.load:_read",
        "except Damaged as error:",
        "except (Damaged, OSError) as error:",
        ("faults", READS, "EIO"),
    ),
    "when all are damaged, it starts afresh": (
        "store.load:load_newest",
        "Loaded(steps=[*steps.values()])",
        "Loaded()",
        ("", "when_all_are_damaged_nothing_starts_afresh_by_itself"),
    ),
    "received bytes are not compared": (
        "extras.relay:relay",
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
        "raise state.invalid",
        "pass",
        ("", "a_state_cut_in_two_is_never_saved"),
    ),
    "the best one is pruned": (
        "checkpoint.writer:Writer.prune",
        'best_of(choices).get("step")',
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


def break_it(place, old, new):
    """Gives a function other code; who has imported it has that, too."""
    name, path = place.split(":")
    module = importlib.import_module(f"common.{name}")
    function = inspect.unwrap(operator.attrgetter(path)(module))
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(old) == 1, f"{text.count(old)} times: {old}"
    made = {**vars(module)}
    exec(text.replace(old, new), made)
    function.__code__ = inspect.unwrap(made[function.__name__]).__code__


def run(killer, folder, mutant=None):
    """True if the test passes in a child with this mutant (or with none)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setpgid(0, 0)
            signal.alarm(DEADLINE)
            if mutant:
                break_it(*mutant[:3])
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
