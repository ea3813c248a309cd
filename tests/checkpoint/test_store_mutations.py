# ruff: noqa: E501  (a table: the text that is replaced stands as it does in the store)
"""A test of the tests: each way to break the store, built into its source, makes one of them fail; unbroken,
they pass.

Every mutant lives in a forked child that imports the store anew with one piece of its text replaced.
"""
import importlib
import importlib.util
import inspect
import os
import signal
import sys
from pathlib import Path

import pytest
import ranks

import common

DEADLINE = 100
ROOM = Path(common.__file__).parent / "checkpoint"
STORE = ("world", "world.world", "checkpoint",
         *sorted(f"checkpoint.{path.stem}" for path in ROOM.glob("[a-z]*.py")),
         "rescue")
CRASH = ("crash", "every_crash_state_leaves_the_old_checkpoint_or_the_new_one_whole")
BITS = ("damage", "every_single_bit_of_every_file_falls_back_when_it_flips", 4)
LENGTHS = ("damage", "every_length_of_every_file_but_the_right_one_falls_back")
MANIFEST = ("damage", "harmful_manifests_are_refused_even_under_a_right_seal")
FSYNC = ("faults", "a_failed_fsync_is_never_retried_on_the_same_file")
NAMES = ("faults", "a_damaged_name_is_not_used_again_and_earlier_facts_do_not_follow_later_ones")
MOVED = ("fence", "a_staging_that_was_moved_away_lets_nothing_through_at_any_point_of_a_save")
UNREAD = ("faults",
          "what_stays_unreadable_ends_the_start_and_is_neither_passed_over_nor_put_aside_nor_deleted", "EIO")
CLAIMS = ("fence", "of_two_that_claim_at_the_same_time_one_owns_and_the_other_saves_nothing")
RESCUES = ("fence", "a_rescue_is_waited_for_while_it_lives_and_moves_and_no_longer")
ROWS = ("parts", "rows_of_a_tensor_are_read_out_of_parts_of_any_size")
DIFFER = ("ranks", "replicas_that_differ_are_noticed_and_nothing_of_theirs_stays")
WHOLE = "                if is_there != kinds.get(name):\n"
SYNC = "        yield fd\n        os.fsync(fd)\n"

MUTANTS = {
    # what is on the disk when it is said to be
    "a file is not synced": ("checkpoint.disk", SYNC, "        yield fd\n", *CRASH),
    "no folder is synced": ("checkpoint.disk", "    try:\n        os.fsync(fd)\n", "    try:\n        pass\n", *CRASH),
    "the checkpoint's folder is not synced": ("checkpoint.folder", "        disk.sync_folder(folder)\n", "", *CRASH),
    "the rename is not synced": ("checkpoint.folder", "        disk.sync_folder(self.root)\n", "", *CRASH),
    "written in place, without a rename": (
        "checkpoint.folder", "                os.mkdir(aside, 0o700)\n",
        '                aside = self.root / folder_name(facts["step"])\n                os.mkdir(aside, 0o700)\n', *CRASH),
    "renamed before the manifest is there": (
        "checkpoint.folder", "                self._describe(aside, files, facts)\n"
        "                if self.layout.parts > 1:\n                    return self._gather(aside, facts)\n"
        '                return self._name(aside, facts["step"])\n',
        '                aside = self._name(aside, facts["step"])\n'
        "                self._describe(aside, files, facts)\n                return aside\n", *CRASH),
    "old ones deleted before the new one is written": (
        "checkpoint.folder", "        for attempt in (1, 2):\n",
        "        self.prune([folder for _, folder in checkpoints(self.root)[1:]])\n        for attempt in (1, 2):\n", *CRASH),
    "the name of a damaged one is used again": ("checkpoint.folder", "name.removeprefix(ASIDE)", "name", *NAMES),
    "earlier facts follow later ones": ("checkpoint.folder", "[1]) >= _how_far(facts)", "[1]) == _how_far(facts)", *NAMES),
    "a failed fsync is tried again": (
        "checkpoint.disk", SYNC, SYNC.replace("        os.fsync(fd)\n", "        try:\n            os.fsync(fd)\n"
                                              "        except OSError:\n            os.fsync(fd)\n"), *FSYNC, 1),
    "a failed fsync is overlooked": (
        "checkpoint.disk", SYNC, SYNC.replace("        os.fsync(fd)\n", "        with suppress(OSError):\n            os.fsync(fd)\n"), *FSYNC, 1),
    "a rename of which nobody knows is taken for committed": (
        "checkpoint.folder", "        disk.sync_folder(self.root)\n",
        "        with suppress(OSError):\n            disk.sync_folder(self.root)\n", *FSYNC, 6),
    "a short write is taken for a whole one": ("checkpoint.disk", "        data = data[count:]\n", "        data = data[:0]\n",
                                               "faults", "a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all"),
    # what is believed
    "the hash is not compared": ("checkpoint.tensors", "                if digest.hexdigest() != stated:", "                if False:", *BITS),
    "a thread's damage is not heard of": ("checkpoint.tensors", "            return list(pool.map(act, items))",
                                          "            return pool.map(act, items)", *BITS),
    "the header is not compared": ("checkpoint.tensors", "        if start != header:\n", "        if False:\n", *BITS),
    "the seal is ignored": ("checkpoint.disk", "    if sealed(value) != data:\n", "    if False:\n", *BITS),
    "the values of JSON are compared, not the bytes": ("checkpoint.disk", "sealed(value) != data", "json.loads(sealed(value)) != json.loads(data)", *LENGTHS),
    "the size is not compared": ("checkpoint.tensors", "        if found != size:\n", "        if False:\n", *LENGTHS),
    "other shapes are taken": ("checkpoint.load", WHOLE, "                if False:\n", "damage", "the_wrong_net_is_named_with_both_shapes"),
    "rows may be missing": ("checkpoint.load", WHOLE, "                if False:\n", *ROWS),
    "rows need not follow each other": ("checkpoint.load", "                if before != ", "                if False and ", *ROWS),
    "other rows are taken": ("checkpoint.load", "room[low - at : high - at]", "room[low:high]", *ROWS),
    "facts of another step are taken": ("checkpoint.folder", '    if facts.get("step") != step:\n', "    if False:\n",
                                        "damage", "harmful_facts_are_refused_whatever_the_manifest_says", "another step"),
    "a path out of the folder is taken": ("checkpoint.folder", "        if not FILE.fullmatch(path):\n", "        if False:\n", *MANIFEST, "a path out of the folder"),
    "a stated digest is believed": ("checkpoint.folder", "{digest_of(manifest['files'])}", "{manifest['digest']}",
                                    "damage", "the_digest_that_is_shown_is_that_of_the_tables_whatever_the_manifest_says"),
    "another format is taken for damage": ("checkpoint.folder", "        raise UserError(\n            f\"{folder} has format", "        raise Damaged(\n            f\"{folder} has format",
                                           "identity", "a_checkpoint_of_another_format_is_refused_in_three_lines_and_nothing_is_touched", 1),
    "when all are damaged, it starts afresh": ("checkpoint.store", "        if found.names:\n", "        if False:\n", "",
                                               "when_all_are_damaged_nothing_starts_afresh_by_itself"),
    "a damaged one stays in the way": ("checkpoint.folder", '        aside = self.root / f"{ASIDE}{folder.name}"\n', "        return\n", "",
                                       "a_damaged_newest_is_put_aside_and_its_step_can_be_saved_again"),
    "a read that fails is not tried again": ("checkpoint.disk", "                if pause is None:\n", "                if True:\n", "faults",
                                             "whichever_read_fails_once_the_newest_checkpoint_is_loaded", "preadv", "EIO"),
    "what cannot be read is taken for damaged": ("checkpoint.disk", "                if error.errno in WRONG:\n", "                if True:\n", *UNREAD),
    "contradicting options are let in": ("checkpoint.store", "        opts.refuse_another_run(", "        str(", "identity",
                                         "contradicting_options_and_changed_data_are_refused_with_both_values"),
    "a checkpoint of another run is let in": ("checkpoint.store", "        if foreign:\n", "        if False:\n",
                                              "identity", "a_checkpoint_of_another_run_is_no_damage_and_is_refused"),
    "two ranks complete one folder": (
        "checkpoint.folder", "            os.rename(gathered, mine)", "            mine = gathered",
        "parts", "a_folder_that_another_rank_has_taken_and_a_third_made_anew_is_never_named"),
    "damage that one rank found is overlooked": (
        "checkpoint.load", "    return all(gather(world, right))", "    return True",
        "parts", "damage_that_one_rank_alone_reads_makes_all_take_the_one_before", "part-00002/", "model"),
    "received bytes are not compared": ("checkpoint.load", "sha(data) == stated", "bool(sha(data))",
                                        "parts", "a_rank_that_receives_wrong_bytes_stays_with_the_others_and_all_take_the_one_before"),
    # who may write
    "the lease is no longer than for our own job": ("checkpoint.fence", "(STALE_SECONDS if near else LEASE_SECONDS)", "STALE_SECONDS",
                                                    "fence", "an_owner_whose_moves_show_late_is_not_robbed"),
    "the counter stays in memory": ("checkpoint.fence", "        os.fdatasync(self.fd)\n", "",
                                    "fence", "each_move_of_a_counter_is_synced_for_other_machines"),
    "a name is owned as long as it is there": ("checkpoint.fence", "            return os.path.samestat(os.fstat(self.fd), os.fstat(fd))\n", "            return True\n", *CLAIMS),
    "a claim does not look at the name again": ("checkpoint.fence", "        if not self.held.is_ours():\n", "        if False:\n", *CLAIMS),
    "nothing is swept": ("checkpoint.fence", "        self._sweep([", "        str([", "fence",
                         "a_stopped_owner_is_taken_over_and_its_late_commit_is_refused"),
    "what is put aside passes no fence": ("checkpoint.folder", "os.rename(folder, passing)", "passing = folder",
                                          "fence", "a_life_that_was_taken_over_puts_nothing_aside"),
    "the fence is skipped": ("checkpoint.folder", "            self.staging.unlink()\n", "            return\n", *MOVED),
    "a rescue under way is swept": ("checkpoint.fence", "                    wait_for(lock)\n", "                    pass\n",
                                    "fence", "a_rescue_under_way_is_waited_for_before_anything_is_swept"),
    "a rescue that hangs is waited for": ("checkpoint.fence", "            if still(self.progress()) < HUNG_SECONDS:\n", "            if True:\n", *RESCUES),
    "each node has a deadline of its own": ("checkpoint.fence", "NODE_STILL_SECONDS, deadline)", "NODE_STILL_SECONDS, time.monotonic() + NODES_SECONDS)",
                                            "fence", "nodes_that_do_not_leave_are_waited_for_together_and_write_rarely"),
    "time in which nobody could look counts": ("checkpoint.fence", "min(now - self.looked, LOOK_SECONDS)", "now - self.looked",
                                               "fence", "time_in_which_nobody_could_look_is_not_time_in_which_the_owner_stood_still"),
    "every node claims the folder": ("checkpoint.store", "            if rank and not fence.elect():\n", "            if False:\n",
                                     "ranks", "a_shared_folder_has_one_owner_and_of_many_rescuers_one_writes"),
    "a node is not heard of": ("checkpoint.store", "                fence.attend(rank)\n", "",
                               "fence", "a_survivor_that_has_not_begun_its_rescue_is_waited_for"),
    "all that stop save": ("checkpoint.fence", "            held = Held(path, progress=progress)\n",
                           "            held = Held(path, path.with_name(uuid.uuid4().hex), progress)\n",
                           "ranks", "a_shared_folder_has_one_owner_and_of_many_rescuers_one_writes"),
    # what is saved
    "a failed save counts as saved": ("checkpoint.store", "        self.saved = None  # so that", "        pass  # so that", "faults",
                                      "the_last_save_is_retried_and_a_run_that_cannot_be_saved_does_not_end_well"),
    "failures are not counted": ("checkpoint.store", "        self.failures += 1\n", "", "faults",
                                 "failed_saves_are_said_retried_at_the_next_interval_and_end_the_run_after_three"),
    "half a step is saved": ("checkpoint.store", " or state.spoiled or state.facts() == self.saved:", " or state.facts() == self.saved:", "", "a_state_cut_in_two_is_never_saved"),
    "half a step is rescued": ("checkpoint.store", "                if state.spoiled:\n", "                if False:\n", "", "a_state_cut_in_two_is_never_saved"),
    "NaN is saved": ("checkpoint.store", "        if name:\n", "        if False:\n", "",
                     "a_state_that_is_not_finite_is_never_saved"),
    "the best one is pruned": ("checkpoint.store", 'best_of(choices).get("step"), *newest', "*newest", "",
                               "the_newest_ones_the_best_one_and_nothing_else_is_kept"),
    "the best one goes with a save that fails": ("checkpoint.store", 'best_of(choices).get("step")', 'facts["best"]["step"]', "",
                                                 "the_best_one_stays_until_a_better_one_is_on_the_disk", "fails"),
    "what no start would read is named": ("checkpoint.folder", '        read_facts(facts["step"], folder)\n', "", "faults",
                                          "what_no_start_would_read_is_a_failed_save", "too large"),
    # what ranks agree on
    "replicas are not compared": ("checkpoint.store", "        if odd:\n", "        if False:\n", *DIFFER, "a buffer"),
    "what diverged stays": ("checkpoint.store", "            if step > self.agreed:\n", "            if False:\n", *DIFFER, "a buffer"),
    "the sum over weights has holes": ("world.world", "view(torch.int64).sum()", "view(torch.int64)[1:].sum()", "identity",
                                       "every_flipped_bit_and_every_swap_between_tensors_changes_the_sum"),
}
KILLERS = list({str(mutant[3:]): mutant[3:] for mutant in MUTANTS.values()}.values())


class Mutating(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module of the store with `old` replaced by `new`."""

    def __init__(self, name, old, new):
        super().__init__(f"common.{name}", str(Path(common.__file__).parent / f"{name.replace('.', '/')}.py"))
        self.old = old
        self.new = new

    def find_spec(self, fullname, path, target=None):
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname):
        text = self.get_data(self.path).decode()
        assert text.count(self.old) == 1, f"{text.count(self.old)} times: {self.old}"
        return compile(text.replace(self.old, self.new), self.path, "exec")


def run(killer, folder, mutant=None):
    """True if the test passes in a child with this mutant (or with none)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setpgid(0, 0)
            signal.alarm(DEADLINE)
            for name in [*(f"common.{name}" for name in STORE), "stores",
                         *(name for name in sys.modules if name.startswith("test_store"))]:
                parent, _, leaf = name.rpartition(".")
                # a package keeps its modules as attributes too
                vars(sys.modules.get(parent, sys)).pop(leaf, None)
                sys.modules.pop(name, None)
            if mutant:
                sys.meta_path.insert(0, Mutating(*mutant[:3]))
                importlib.import_module(f"common.{mutant[0]}")
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
    assert not run(mutant[3:], tmp_path, mutant)[0]
