"""What the store keeps, and what it gives back after a crash."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from midflight.errors import StoreCorrupt, StoreFailed, UnknownLease
from midflight.trajectories import Store
from midflight.types import Batch, Fate, Group, GroupKey, Reason, RolloutKey

from .making import group, key, task, trajectory, turn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "store.sqlite"


def opened(path: Path) -> Store:
    return Store(path, run="tests")


def finish(store: Store, index: int, *, version: int = 0) -> Group:
    """A whole group, from its admission to its waiting."""
    made = group(key(index), version=version)
    store.admit(made.key, task(index))
    for each in made.trajectories:
        store.finish_rollout(each)
    store.finish_group(made.key)
    return made


def keys(groups: tuple[Group, ...]) -> list[GroupKey]:
    return [g.key for g in groups]


def test_a_waiting_group_comes_back_as_it_was_in_the_order_of_finishing(path: Path) -> None:
    store = opened(path)
    finish(store, 4)
    made = finish(store, 2, version=3)
    store.close()
    recovered = opened(path).recover(0)
    assert keys(recovered.waiting) == [key(4), key(2)]
    again = recovered.waiting[1]
    assert (again.task_id, again.source) == ("task-2", "letters")
    for one, other in zip(again.trajectories, made.trajectories, strict=True):
        assert (one.key, one.reward, one.truncated, one.error) == (other.key, other.reward, other.truncated, other.error)
        for name in ("token_ids", "generated", "loss_mask", "logprobs", "versions", "kv_versions"):
            a, b = getattr(one.rows[0], name), getattr(other.rows[0], name)
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
    assert recovered.tasks == {key(4): task(4), key(2): task(2)}


def test_an_unfinished_group_comes_back_with_ended_rollouts_and_recorded_turns(path: Path) -> None:
    store = opened(path)
    store.admit(key(0, attempt=1), task(0))
    running, ended = RolloutKey(key(0, 1), 0), trajectory(key(0, 1), 1, reward=None)
    for number, made in enumerate((turn(1, 2), turn(3))):
        store.record_turn(running, number, made)
        store.record_turn(ended.key, number, made)
    store.finish_rollout(ended)
    store.close()
    (unfinished,) = opened(path).recover(0).unfinished
    assert (unfinished.key, unfinished.task) == (key(0, 1), task(0))
    assert unfinished.turns == {running: (turn(1, 2), turn(3))}
    assert [(t.key, t.reward) for t in unfinished.finished] == [(ended.key, None)]


def test_the_turns_of_a_retry_replace_those_of_the_try_before(path: Path) -> None:
    store = opened(path)
    store.admit(key(0), task(0))
    running = RolloutKey(key(0), 0)
    for number, made in [(0, turn(1)), (1, turn(2)), (0, turn(3))]:
        store.record_turn(running, number, made)
    (unfinished,) = store.recover(0).unfinished
    assert unfinished.turns == {running: (turn(3),)}


def test_a_finished_group_keeps_no_turns_of_rollouts_that_left_no_record(path: Path) -> None:
    store = opened(path)
    store.admit(key(0), task(0))
    store.record_turn(RolloutKey(key(0), 1), 0, turn(1))
    store.finish_rollout(trajectory(key(0), 0))
    store.finish_group(key(0))
    assert sqlite3.connect(path).execute("SELECT count(*) FROM turns").fetchone() == (0,)


def test_the_next_position_follows_the_last_admission_and_attempts_do_not_move_it(path: Path) -> None:
    store = opened(path)
    assert store.recover(0).next_position == (0, 0)
    for epoch, index in ((0, 5), (1, 0), (1, 1)):
        store.admit(GroupKey(epoch, index), task(index))
    store.requeue(key(5), Reason.STALE)
    assert store.recover(0).next_position == (1, 2)


def test_i8_steps_up_to_the_checkpoint_are_final_and_later_ones_wait_again_exactly_once(path: Path) -> None:
    store = opened(path)
    groups = [finish(store, index) for index in range(4)]
    for version in range(3):
        store.lease(Batch(version + 1, version, (groups[version],)))
    store.done(1)
    store.done(2)
    recovered = store.recover(1)
    assert keys(recovered.waiting) == [key(1), key(2), key(3)]
    assert (recovered.leases, recovered.highest_version, recovered.next_lease) == ((), 3, 4)
    assert keys(store.recover(1).waiting) == [key(1), key(2), key(3)]


def test_i8_a_step_in_the_checkpoint_is_final_though_its_done_was_lost(path: Path) -> None:
    store = opened(path)
    store.lease(Batch(1, 6, (finish(store, 0),)))
    assert store.recover(7).waiting == ()
    assert store.token_fates() == {(Fate.TRAINED, None): 4}


def test_while_the_trainer_lives_its_leases_stand(path: Path) -> None:
    store = opened(path)
    store.lease(Batch(1, 0, (finish(store, 0),)))
    store.done(1)
    store.lease(Batch(2, 1, (finish(store, 2), finish(store, 1))))
    (batch,) = store.recover(None).leases
    assert (batch.lease, batch.train_version, keys(batch.groups)) == (2, 1, [key(1), key(2)])
    store.done(2)
    store.checkpointed(2)
    assert store.recover(2).waiting == ()


def test_a_trainer_that_restarts_gets_back_the_steps_its_checkpoint_lacks(path: Path) -> None:
    store = opened(path)
    for version in range(3):
        store.lease(Batch(version + 1, version, (finish(store, version),)))
    store.done(1)
    store.done(2)
    assert keys(store.revert(1)) == [key(1)], "the third was never done: a living buffer has it as an open lease"
    assert keys(store.recover(1).waiting) == [key(1), key(2)]


def test_i8_a_group_cannot_be_leased_twice(path: Path) -> None:
    store = opened(path)
    made = finish(store, 0)
    store.lease(Batch(1, 0, (made,)))
    with pytest.raises(AssertionError, match="I8"):
        store.lease(Batch(2, 1, (made,)))
    store.done(1)
    store.checkpointed(1)
    with pytest.raises(UnknownLease, match="Lease 1"):
        store.take_back(1)


def test_a_batch_that_leaves_once_more_is_the_same_lease(path: Path) -> None:
    store = opened(path)
    batch = Batch(1, 0, (finish(store, 0),))
    store.lease(batch)
    store.lease(batch)
    assert keys(store.recover(0).waiting) == [key(0)]


def test_i8_a_lease_number_given_again_does_not_touch_groups_that_are_final(path: Path) -> None:
    store = opened(path)
    store.lease(Batch(1, 0, (finish(store, 0),)))
    assert store.recover(1).waiting == ()
    store.lease(Batch(1, 1, (finish(store, 1),)))
    assert keys(store.recover(1).waiting) == [key(1)]
    assert store.token_fates() == {(Fate.TRAINED, None): 4, (Fate.WAITING, None): 4}


def test_a_requeued_task_is_in_line_at_once(path: Path) -> None:
    store = opened(path)
    finish(store, 0)
    store.requeue(key(0), Reason.REQUEUED)
    recovered = store.recover(0)
    assert recovered.waiting == ()
    assert [u.key for u in recovered.unfinished] == [key(0, attempt=1)]
    assert store.token_fates() == {(Fate.DROPPED, Reason.REQUEUED): 4}


def test_a_skipped_step_ends_its_groups_and_its_lease(path: Path) -> None:
    store = opened(path)
    store.lease(Batch(1, 0, (finish(store, 0),)))
    store.drop_group(key(0), Reason.NOT_FINITE)
    assert store.recover(None).leases == () and store.recover(0).waiting == ()
    assert store.token_fates() == {(Fate.DROPPED, Reason.NOT_FINITE): 4}


def test_i3_every_token_of_an_ended_rollout_has_one_fate(path: Path) -> None:
    store = opened(path)
    store.admit(key(0), task(0))
    store.finish_rollout(trajectory(key(0), 0, num_tokens=5), masked={Reason.NOT_POLICY_SAMPLED: 3}, dropped={Reason.OVERSHOOT: 2})
    store.finish_rollout(trajectory(key(0), 1, reward=None, num_tokens=7))
    store.finish_rollout(trajectory(key(0), 1, num_tokens=6))  # its retry
    store.finish_group(key(0))
    decided = {(Fate.MASKED, Reason.NOT_POLICY_SAMPLED): 3, (Fate.DROPPED, Reason.OVERSHOOT): 2, (Fate.DROPPED, Reason.NO_REWARD): 7}
    assert store.token_fates() == {**decided, (Fate.WAITING, None): 11}

    (whole,) = store.recover(0).waiting
    trimmed = Group(whole.key, whole.task_id, whole.source, (whole.trajectories[0],))
    trimmed = Group(whole.key, "", "", (*trimmed.trajectories, trajectory(key(0), 1, num_tokens=0)))
    store.lease(Batch(1, 4, (trimmed,)))
    assert store.token_fates() == {**decided, (Fate.WAITING, None): 5, (Fate.MASKED, Reason.STALE): 6}
    store.done(1)
    assert store.token_fates() == {**decided, (Fate.TRAINED, None): 5, (Fate.MASKED, Reason.STALE): 6}
    store.revert(4)
    assert store.token_fates() == {**decided, (Fate.WAITING, None): 11}


def test_deeds_applied_together_happen_all_or_not_at_all(path: Path) -> None:
    store = opened(path)
    with pytest.raises(UnknownLease):
        store.apply([lambda s: s.admit(key(0), task(0)), lambda s: s.done(99)])
    assert store.recover(0).next_position == (0, 0)
    store.apply([lambda s: s.admit(key(0), task(0)), lambda s: s.checkpointed(0)])
    assert store.recover(0).next_position == (0, 1)


def test_a_file_of_another_run_is_refused(path: Path) -> None:
    opened(path).close()
    with pytest.raises(StoreCorrupt, match="belongs to run 'tests', not 'other'"):
        Store(path, run="other")


def test_a_file_that_is_no_store_is_refused_with_the_remedy(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(StoreCorrupt, match=r"store\.sqlite.*run folder"):
        opened(path)
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(StoreCorrupt, match="not a store of Midflight"):
        opened(path)


def test_a_newer_schema_is_refused_by_number(path: Path) -> None:
    opened(path).close()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(StoreCorrupt, match="schema is 99"):
        opened(path)


def test_damage_inside_the_file_is_an_error_not_a_wrong_answer(path: Path) -> None:
    store = opened(path)
    for index in range(200):
        finish(store, index)
    store.close()
    whole = bytearray(path.read_bytes())
    for at in range(4096, len(whole), 4096):  # every page but the first
        whole[at : at + 64] = bytes(64)
    path.write_bytes(whole)
    with pytest.raises(StoreCorrupt, match="restore the file"):
        opened(path).recover(0)


def test_a_full_disk_is_named_and_what_was_committed_stays(path: Path) -> None:
    store = opened(path)
    finish(store, 0)
    store._db.execute("PRAGMA max_page_count = 30")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StoreFailed, match="free some space"):
        for index in range(1, 10_000):
            finish(store, index)
    store.close()
    assert keys(opened(path).recover(0).waiting)[0] == key(0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="permissions"):
        opened(tmp_path / "file" / "store.sqlite")
