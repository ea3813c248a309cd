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
STORE = ("world", "world.agreement", "checkpoint",
         *sorted(f"checkpoint.{path.stem}" for path in ROOM.glob("[a-z]*.py")),
         "rescue", "rescue.rescue", "rescue.watchdog")
CRASH = ("crash", "every_crash_state_leaves_the_old_checkpoint_or_the_new_one_whole")
BITS = ("damage", "every_single_bit_of_every_file_falls_back_when_it_flips")
LENGTHS = ("damage", "every_length_of_every_file_but_the_right_one_falls_back")
MANIFEST = ("damage", "harmful_manifests_are_refused_even_under_a_right_seal")
TENSORS = ("damage", "harmful_tensors_are_refused_whatever_the_manifest_says")
FACTS = ("damage", "harmful_facts_are_refused_whatever_the_manifest_says")
LINKS = ("damage", "links_pipes_and_folders_in_place_of_files_are_not_followed_nor_waited_for")
FSYNC = ("faults", "a_failed_fsync_is_never_retried_on_the_same_file")
MOVED = ("fence", "a_staging_that_was_moved_away_lets_nothing_through_at_any_point_of_a_save")
UNREAD = ("faults",
          "what_stays_unreadable_ends_the_start_and_is_neither_passed_over_nor_put_aside_nor_deleted", "EIO")
LATE = ("fence", "an_owner_whose_moves_show_late_is_not_robbed")
CACHES = ("fence", "the_counter_is_seen_through_the_caches_of_both_machines")
TWO = ("fence", "of_two_that_claim_at_the_same_time_one_owns_and_the_other_saves_nothing")
RESCUES = ("fence", "a_rescue_is_waited_for_while_it_lives_and_moves_and_no_longer")
AFRESH = ("identity", "starting_afresh_killed_half_way_is_ended_by_the_next_start")
BLOCKS = ("blocks", "every_bit_of_every_block_falls_back_when_it_flips")
OTHER_BLOCKS = ("blocks", "a_manifest_that_tells_of_other_blocks_is_refused_even_under_a_right_seal")
SLOW_DISK = ("test_rescue", "a_disk_that_takes_three_times_the_hang_limit_costs_nothing", "write")
ROWS = ("parts", "rows_of_a_tensor_are_read_out_of_parts_of_any_size")
DIFFER = ("ranks", "replicas_that_differ_are_noticed_and_nothing_of_theirs_stays")

MUTANTS = {
    # what is on the disk when it is said to be
    "a file is not synced": ("checkpoint.blocks",
                             "        os.fsync(fd)\n    finally:\n        os.close(fd)\n    return entry",
                             "        pass\n    finally:\n        os.close(fd)\n    return entry", *CRASH),
    "no folder is synced": ("checkpoint.files", "    try:\n        os.fsync(fd)\n",
                            "    try:\n        pass\n", *CRASH),
    "the checkpoint's folder is not synced": ("checkpoint.commit", "        files.sync_folder(final)\n", "",
                                              *CRASH),
    "the rename is not synced": ("checkpoint.commit", "                files.sync_folder(self.root)\n", "",
                                 *CRASH),
    "written in place, without a rename": (
        "checkpoint.commit", "        os.mkdir(aside, 0o700)\n",
        '        aside = self.root / next(free_names(self.root, facts["step"]))\n        os.mkdir(aside, 0o700)\n', *CRASH),
    "renamed before the manifest is there": (
        "checkpoint.commit", "        self._write_manifest(aside, aside, facts, written, digest_of(roots_of(written)))\n"
        '        return self._name(aside, facts["step"])\n',
        '        aside = self._name(aside, facts["step"])\n'
        "        self._write_manifest(aside, aside, facts, written, digest_of(roots_of(written)))\n        return aside\n", *CRASH),
    "old ones deleted before the new one is written": (
        "checkpoint.commit", "        for attempt in (1, 2):\n",
        "        self.delete_old(1, set())\n        for attempt in (1, 2):\n", *CRASH),
    "earlier facts of a step go before the later ones are read back": (
        "checkpoint.commit", "                files.sync_folder(self.root)\n",
        "                files.sync_folder(self.root)\n                self.delete_old(99, set())\n",
        "faults", "later_facts_of_a_step_get_a_name_of_their_own_and_the_earlier_ones_go_last"),
    "earlier facts of a step win": (
        "checkpoint.manifest", "sorted(found, reverse=True)", "sorted(found, key=lambda f: (f[0], -f[1]), reverse=True)",
        "faults", "later_facts_of_a_step_get_a_name_of_their_own_and_the_earlier_ones_go_last"),
    "the name of a damaged one is used again": (
        "checkpoint.manifest", "name.removeprefix(ASIDE)", "name",
        "faults", "a_damaged_name_is_not_used_again_and_earlier_facts_do_not_follow_later_ones"),
    "earlier facts follow later ones": (
        "checkpoint.manifest", "[1]) >= _how_far(facts)", "[1]) == _how_far(facts)",
        "faults", "a_damaged_name_is_not_used_again_and_earlier_facts_do_not_follow_later_ones"),
    "a state that is there is saved once more": (
        "checkpoint.manifest", "[1]) >= _how_far(facts)", "[1]) > _how_far(facts)",
        "", "step_zero_and_the_state_of_a_finished_run_are_saved_once"),
    "old ones deleted without reading the new one back": (
        "checkpoint.saving", '                self.writer.read_back(facts["step"], folder)\n', "",
        "faults", "old_ones_go_only_after_the_new_one_was_read_back"),
    "a failed fsync is tried again": ("checkpoint.blocks",
                                      "        os.fsync(fd)\n    finally:\n        os.close(fd)\n    return entry",
                                      "        try:\n            os.fsync(fd)\n        except OSError:\n            os.fsync(fd)\n"
                                      "    finally:\n        os.close(fd)\n    return entry", *FSYNC, 1),
    "a failed fsync is overlooked": ("checkpoint.blocks",
                                     "        os.fsync(fd)\n    finally:\n        os.close(fd)\n    return entry",
                                     "        try:\n            os.fsync(fd)\n        except OSError:\n            pass\n"
                                     "    finally:\n        os.close(fd)\n    return entry", *FSYNC, 2),
    "a rename of which nobody knows is taken for committed": (
        "checkpoint.commit", "                files.sync_folder(self.root)\n",
        "                with contextlib.suppress(OSError):\n                    files.sync_folder(self.root)\n",
        *FSYNC, 6),
    "a short write is taken for a whole one": ("checkpoint.blocks", "at += os.pwrite(fd, view[at - start:], at)", "at += os.pwrite(fd, view[at - start:], at) and end - at",  # noqa: E501
                                               "faults", "a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all"),
    # what is believed
    "the hash is not compared": ("checkpoint.blocks", "digest.hexdigest() != stated:", "digest.hexdigest() != stated and False:", *BITS),
    "the seal is ignored": ("checkpoint.files", 'value.pop("seal", None) != hashlib.sha256(to_json(value)).hexdigest():', 'value.pop("seal", None) is None:', *BITS),
    "the values of JSON are compared, not the bytes": ("checkpoint.files", "ours and to_json(value) != data:", "ours and json.loads(to_json(value)) != value:",
                                                       *LENGTHS),
    "JSON that others have written is taken": ("checkpoint.files", "ours and to_json(value) != data:", "False:", *FACTS, "a name twice"),
    "the size is not compared": ("checkpoint.blocks", "!= entry[\"bytes\"]:\n            raise", "!= entry[\"bytes\"] and False:\n            raise", *LENGTHS),  # noqa: E501
    "the header is not compared": ("checkpoint.tensor_file", "    if header != data:\n", "    if False:\n",
                                   *TENSORS, "overlapping offsets"),
    "types and shapes are not compared": (
        "checkpoint.layout", "            if dtype != ours[2] or shape[1:] != ours[3][1:] or len(shape) != len(ours[3]):\n",
        "            if False:\n", *TENSORS, "another type"),
    "a file decides how much memory is allocated": (
        "checkpoint.layout", '        if length > min(len(header), entry["bytes"]):', "        if False:",
        *TENSORS, "a header of 2**63 bytes"),
    "links are followed": ("checkpoint.files", "proven(path):\n        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW |", "proven(path):\n        fd = os.open(path, os.O_RDONLY |", *LINKS),  # noqa: E501
    "the kinds in a manifest are not looked at": ("checkpoint.manifest", "        if type(manifest.get(name)) is not kind:\n", "        if False:\n",  # noqa: E501
                                                  *MANIFEST, "no identity"),
    "a manifest of another step is taken": ("checkpoint.manifest", '    if manifest["step"] != step:\n', "    if False:\n", *MANIFEST, "another step"),  # noqa: E501
    "the digest is not compared": ("checkpoint.manifest", '    if manifest["digest"] != digest or', '    if',  # noqa: E501
                                   *MANIFEST, "another digest"),
    "facts of another step are taken": ("checkpoint.manifest", '    if facts["step"] != step:\n', "    if False:\n", *FACTS, "another step"),  # noqa: E501
    "the folder's owner and mode are not looked at": ("checkpoint.owner", "        trusted(run_dir)\n", "",
                                                      "damage",
                                                      "a_folder_that_others_may_write_into_is_not_loaded_from"),
    "when all are damaged, it starts afresh": ("checkpoint.store", "        elif found.offered:\n",
                                               "        elif False:\n", "",
                                               "when_all_are_damaged_nothing_starts_afresh_by_itself"),
    "a damaged one stays in the way": ("checkpoint.commit", '        to = self.root / f"{ASIDE}{folder.name}"\n', "        return\n", "",  # noqa: E501
                                       "a_damaged_newest_is_put_aside_and_its_step_can_be_saved_again"),
    "a read that fails is not tried again": ("checkpoint.files", "        for pause in RETRY_SECONDS:\n", "        for pause in ():\n", "faults",  # noqa: E501
                                             "a_read_that_fails_at_a_start_costs_no_checkpoint"),
    "what cannot be read is taken for damaged": ("checkpoint.files", "        if error.errno in WRONG:\n", "        if True:\n", *UNREAD),  # noqa: E501
    "what cannot be read is passed over": ("checkpoint.load", "            if unread[0] > step:",
                                           "            if False:", *UNREAD),
    "contradicting options are let in": ("checkpoint.identity", "    if refused := wrong + firm +", "    if refused := [] and", "identity",  # noqa: E501
                                         "contradicting_options_and_changed_data_are_refused_with_both_values"),
    "damage that one rank found is overlooked": (
        "checkpoint.load", "    return hows, not any(now)", "    return hows, True",
        "parts", "damage_that_one_rank_alone_reads_makes_all_take_the_one_before", "part-00002/", "model"),
    "other rows are taken": ("checkpoint.reading", "flat, low - first))", "flat, low - at))", *ROWS, 24),
    "blocks of parts cross those of the whole": (
        "checkpoint.layout", "blocks.BLOCK_BYTES - at % blocks.BLOCK_BYTES)", "blocks.BLOCK_BYTES)", *ROWS, 24),
    "a block is skipped": ("checkpoint.blocks", "in chosen[first::count]:",
                           "in chosen[first + (first > 0)::count]:", *BLOCKS),
    "a thread's damage is not heard of": ("checkpoint.blocks", "        spread(work, count, range(count))",
                                          "        with ThreadPoolExecutor(count) as pool:\n            pool.map(work, range(count))", *BLOCKS),
    "the last block is not compared": ("checkpoint.blocks", "if at + len(piece) == end and",
                                       "if end < os.fstat(fd).st_size and", *BLOCKS),
    "hashes in another order": ("checkpoint.blocks", "hashes = spread(write, threads() + 1, [0, *ends[:-1]], ends)",
                                "hashes = sorted(spread(write, threads() + 1, [0, *ends[:-1]], ends))",
                                "blocks", "the_hashes_in_a_manifest_are_those_of_the_bytes"),
    "blocks need not reach the end": ("checkpoint.manifest", "kind_of(entry)) == entry)", 'kind_of(entry)) | {"bytes": entry["bytes"]} == entry)',
                                      *OTHER_BLOCKS, "without the last", True),
    "blocks need not rise": ("checkpoint.manifest", "all(start < end for", "all(start <= end for",
                             *OTHER_BLOCKS, "an empty one more", True),
    "the one hash need not be that of the blocks": ("checkpoint.manifest", "kind_of(entry)) == entry)",
                                                    "kind_of(entry)) | {(kind := kind_of(entry)): entry[kind]} == entry)", "blocks", "the_one_hash_of_a_file_is_that_of_its_blocks"),
    "a long file whose sync fails counts": (
        "checkpoint.blocks", "            os.fdatasync(fd)\n", "            pass\n",
        "blocks", "a_long_file_whose_disk_fails_in_the_middle_is_no_checkpoint", "fdatasync"),
    # who may write
    "no lock is ever had": ("checkpoint.lock_file", "        return True\n    except (BlockingIOError", "        return False\n    except (BlockingIOError",  # noqa: E501
                            "fence", "the_free_lock_of_a_process_elsewhere_is_taken_in_seconds_and_not_after_a_lease"),
    "a free lock is believed at once": ("checkpoint.fence", " and still >= FREE_LOCK_SECONDS:", ":", *LATE,
                                        "local to each machine"),
    "the lease is no longer than for our own job": ("checkpoint.fence", "STALE_SECONDS if ours else LEASE_SECONDS", "STALE_SECONDS", *LATE, "as they should be"),  # noqa: E501
    "the counter stays in memory": ("checkpoint.lock_file", "            os.fdatasync(self.fd)\n", "",
                                    *CACHES),
    "a name is owned as long as it is there": ("checkpoint.lock_file", "        if ours := os.path.samestat(os.fstat(self.fd), os.fstat(fd)):", "        if ours := True:",  # noqa: E501
                                               *MOVED),
    "a claim keeps the file that is there": ("checkpoint.lock_file", "                os.rename(aside, path)\n", "                os.rename(aside, path) if not os.path.exists(path) else None\n",  # noqa: E501
                                             "fence", "two_that_believe_to_hold_the_lock_do_not_both_own",
                                             "lost"),
    "nothing is swept": ("checkpoint.fence", "        self._sweep()\n", "", "fence",
                         "a_stopped_owner_is_taken_over_and_its_late_commit_is_refused"),
    "a claim does not look at the name again": ("checkpoint.fence", "        self.elect()  # another claim may have swept it\n        self._check()\n", "", *TWO),  # noqa: E501
    "the fence is skipped": ("checkpoint.commit", "            if self.renew is None:\n", "            return os.makedirs(self.staging)\n"  # noqa: E501
                             "            if self.renew is None:\n", *MOVED),
    "staging is renewed without looking at the lock": (
        "checkpoint.fence", "        self.elect()\n        self._check()\n\n    def release", "        self.elect()\n\n    def release", *MOVED),  # noqa: E501
    "a rescue under way is swept": ("checkpoint.fence", "                        _wait_for_rescue(lock)\n", "                        pass\n",  # noqa: E501
                                    "fence", "a_rescue_under_way_is_waited_for_before_anything_is_swept"),
    "a rescue that does not write is given up": ("checkpoint.fence", "held = Held(staging / name, this_process(), aside, moved)", "held = Held(staging / name, this_process() | {'beat': 0}, aside); held.stop.set()",  # noqa: E501
                                                 *RESCUES),
    "a rescue that hangs is waited for": ("checkpoint.fence", '"moved" in owner and', '"left" in owner and',
                                          *RESCUES),
    "a live owner is robbed": ("checkpoint.fence", '"alive": math.inf', '"alive": STALE_SECONDS', "fence",
                               "a_live_owner_is_never_robbed_even_if_it_does_not_move_its_counter"),
    "the job is noted before the old run is set aside": ("checkpoint.fence", '{name: begun.get(name) for name', '{name: self.me.get(name) for name', *AFRESH),  # noqa: E501
    "half of what is set aside is forgotten": ("checkpoint.identity", '    if not os.path.lexists(aside):\n', '    if True:\n', *AFRESH),  # noqa: E501
    "time in which nobody could look counts": ("checkpoint.lock_file", "min(now - self.looked, LOOK_SECONDS)", "now - self.looked",
                                               "fence", "time_in_which_nobody_could_look_is_not_time_in_which_the_owner_stood_still"),
    "every node claims the folder": ("checkpoint.owner", "        if world.rank and not fence.elect():\n", "        if False:\n",
                                     "ranks", "a_shared_folder_has_one_owner_and_of_many_rescuers_one_writes"),
    "a node is not heard of": ("checkpoint.owner", "            return fence.attend(world.rank)\n", "            return None\n",
                               "fence", "a_survivor_that_has_not_begun_its_rescue_is_waited_for"),
    "all that stop take the lock": ("checkpoint.fence", "        if needless and needless():\n", "        if False:\n",
                                    "fence", "of_many_that_stop_at_once_only_one_takes_the_lock"),
    # how a life ends
    "143 whatever became of the save": ("rescue.rescue", 'getattr(failure, "code", UNSAVED)', "STOPPED",
                                        "test_rescue", "143_is_left_with_only_when_the_state_was_saved", "a full disk", 4),
    "the watchdog goes on while a process saves": ("rescue.rescue", "        self.watchdog.stop(0)  # a slow", "        pass  # a slow",
                                                   *SLOW_DISK, 1, "hangs", [1], [1]),
    "a bad sample costs the steps since the last save": ("rescue.rescue", "error.code in (UNSAVED, BROKEN, FENCED)", "error.code in (2, UNSAVED, BROKEN, FENCED)",
                                                         "test_rescue", "what_a_person_must_mend_costs_no_step_unless_the_state_cannot_or_must_not_be_saved", 2, [1]),
    "the moves of others do not count": ("rescue.watchdog", 'if self.moves not in ("", moves):', "if False:",
                                         *SLOW_DISK, 2, "ends", ["done"] * 2, [1]),
    "time that a process was stopped counts": ("rescue.watchdog", "max(0.0, now - self.beaten - LATE_SECONDS)", "0.0",
                                               "test_watchdog", "seconds_in_which_this_process_stood_still_are_no_hang"),
    "the first step has no more time than others": ("rescue.watchdog", "            return OPENING_SECONDS\n", "            return LEAST_LIMIT_SECONDS\n",
                                                    "test_watchdog", "the_limit_is_a_minute_or_twenty_median_steps_and_generous_before_the_first_step"),
    # what is saved
    "a failed save counts as saved": ("checkpoint.saving", "self.committed, self.saved = before, None  # so that",
                                      "self.committed = before  # so that", "faults",
                                      "the_last_save_is_retried_and_a_run_that_cannot_be_saved_does_not_end_well"),
    "failures are not counted": ("checkpoint.saving", "            self.failures += 1\n", "", "faults",
                                 "failed_saves_are_said_retried_at_the_next_interval_and_end_the_run_after_three"),
    "half a step is saved": ("checkpoint.saving", " or state.half_updated or state.facts() == self.saved:", " or state.facts() == self.saved:", "", "a_state_cut_in_two_is_never_saved"),  # noqa: E501
    "half a step is rescued": ("checkpoint.store", "if state.half_updated or any(", "if any(", "",
                               "a_state_cut_in_two_is_never_saved"),
    "NaN is saved": ("checkpoint.saving", 'if name := not_finite(images["model"].views, self.state.names.values()):', "if name := None:", "",  # noqa: E501
                     "a_state_that_is_not_finite_is_never_saved"),
    "the best one is pruned": ("checkpoint.saving", 'facts["best"]["step"], *agreed', 'facts["step"], *agreed',
                               "",
                               "the_newest_ones_the_best_one_and_nothing_else_is_kept"),
    # what ranks agree on
    "replicas are not compared": ("checkpoint.store", "        if odd is not None:\n", "        if False:\n", *DIFFER, "a buffer"),  # noqa: E501
    "what diverged stays": ("checkpoint.store", "                self.writer.put_aside(folder)\n", "", *DIFFER,
                            "a buffer"),
    "the sum over weights has holes": ("world.agreement", "% 2**64\n", "% 2**62\n", "identity",
                                       "every_flipped_bit_and_every_swap_between_tensors_changes_the_sum"),
}
KILLERS = list({str(mutant[3:]): mutant[3:] for mutant in MUTANTS.values()}.values())


class Mutating(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module of the store with `old` replaced by `new`."""

    def __init__(self, name, old, new):
        super().__init__(f"common.{name}", str(Path(common.__file__).parent / f"{name.replace('.', '/')}.py"))
        self.old, self.new = old, new

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
                         *(n for n in sys.modules if n.startswith(("test_store", "test_rescue", "test_watchdog")))]:
                parent, _, leaf = name.rpartition(".")
                # a package keeps its modules as attributes too
                vars(sys.modules.get(parent, sys)).pop(leaf, None)
                sys.modules.pop(name, None)
            if mutant:
                sys.meta_path.insert(0, Mutating(*mutant[:3]))
                importlib.import_module(f"common.{mutant[0]}")
            own = killer[0].startswith("test_")
            module = importlib.import_module(killer[0] if own else "_".join(filter(None, ("test_store", killer[0]))))
            module.THOROUGH = 11
            if mutant:
                module.DEADLINE = 20  # what never comes need not be waited for long
            test = getattr(module, f"test_{killer[1]}")
            patch, small = pytest.MonkeyPatch(), getattr(module, "make_small", print)
            fixtures = {"tmp_path": folder, "run": folder / "run", "monkeypatch": patch, "small": small(patch)}
            names = inspect.signature(test).parameters
            values = [getattr(module, value, value) if type(value) is str else value for value in killer[2:]]
            given = dict(zip([name for name in names if name not in fixtures], values, strict=True))
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
