"""A test of the tests: each way to break the store, built into one of its functions, makes a test fail;
unbroken, they pass.

Every mutant lives in a forked child: in the source of a function a few words give way to others, and the
function gets the code of that.
"""

import importlib
import inspect
import operator
import textwrap

import pytest
from ranks import fork_ranks
from stores import options

CRASH = "crash", "every_crash_state_leaves_the_old_checkpoint_or_the_new_one_whole"
BITS = "damage", "every_single_bit_of_every_file_falls_back_when_it_flips", 4
FROZEN = "frozen", "a_weight_that_moves_though_it_does_not_train_is_written"
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
        "extras.frozen:FrozenLayout.linked",
        "table == table_of(frozen)",
        "True",
        FROZEN,
    ),
    "what has shown damage is linked": (
        "checkpoint.writer:Writer.read_back",
        "self.trusts_disk = False",
        "pass",
        ("frozen", "damage_of_the_one_file_is_found_by_the_next_save_and_made_good_by_the_one_after_it"),
    ),
    # what is believed
    "the hash is not compared": (
        "checkpoint.disk:compare_hash",
        "found != stated",
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
    "received bytes are not compared": (
        "extras.relay:relay",
        "sha(piece.numpy()) == stated",
        "bool(sha(piece.numpy()))",
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
    "a rescue under way is swept": (
        "checkpoint.fence:Fence._sweep",
        '(self.root / name).glob(f"*{RESCUE}")',
        "()",
        SWEPT,
    ),
    # what is saved
    "a failed save counts as saved": (
        "store.saver:Saver._note_failure",
        "self.saved = None",
        "pass",
        RETRIED,
    ),
    "what diverged stays": (
        "extras.differ:roll_back",
        "store.writer.put_aside(folder)",
        "None",
        DIFFER,
    ),
}
KILLERS = list(dict.fromkeys(killer for *_, killer in MUTANTS.values()))


def mutate(place, old, new):
    """(a function, the code that it is to have): who has imported it has that, too."""
    name, path = place.split(":")
    module = importlib.import_module(f"common.{name}")
    function = inspect.unwrap(operator.attrgetter(path)(module))
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(old) == 1, f"{text.count(old)} times: {old}"
    made = {**vars(module)}
    exec(text.replace(old, new), made)
    return function, inspect.unwrap(made[function.__name__]).__code__


def run(killer, folder, broken=None):
    """Runs a test in a child, in which a function may have other code; AssertionError if it fails there."""
    name, test, *given = killer
    module = importlib.import_module(f"test_store_{name}" if name else "test_store")
    test = getattr(module, f"test_{test}")
    fixtures = {"tmp_path": folder, "opts": options(folder), "every": 29}
    names = inspect.signature(test).parameters

    def child(_):
        with pytest.MonkeyPatch.context() as patch:
            own = fixtures | {"monkeypatch": patch}
            own |= dict(zip([name for name in names if name not in own], given, strict=True))
            if broken:
                function, code = broken
                function.__code__ = code
            test(**{name: own[name] for name in names})

    fork_ranks(1, child)


@pytest.mark.parametrize("killer", KILLERS, ids=lambda killer: "-".join(str(k) for k in killer[1:])[:60])
def test_unbroken_the_tests_pass_here_too(tmp_path, killer):
    run(killer, tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_store_is_caught(tmp_path, name):
    *mutant, killer = MUTANTS[name]
    broken = mutate(*mutant)
    with pytest.raises(AssertionError, match="rank 0"):
        run(killer, tmp_path, broken)
