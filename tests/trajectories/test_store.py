"""What the store keeps, and what it gives back after a crash."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from midflight.errors import StoreCorrupt, StoreFailed, UnknownLease
from midflight.trajectories.database import decode_rows, encode_rows
from midflight.types import Batch, Fate, GroupKey, Reason, RolloutKey
from midflight.types.facts import Admitted, CarriedOver, Checkpointed, Interrupted, Leased, Stepped, TakenBack

from .keeping import Keeper
from .making import group, key, row, task, trajectory, turn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "store.sqlite"


def test_a_row_comes_back_with_its_record_of_experts_and_without_one_if_it_had_none() -> None:
    plain = row((5, 6, 7), (False, True, True))
    recorded = replace(plain, experts=np.arange(12, dtype=np.uint8).reshape(3, 4))
    first, second = decode_rows(encode_rows((plain, recorded)))
    assert first.experts is None
    np.testing.assert_array_equal(second.experts, recorded.experts)
    assert recorded.num_bytes == plain.num_bytes + 12


def test_a_waiting_group_comes_back_as_it_was_in_the_order_of_finishing(path: Path) -> None:
    store = Keeper(path)
    store.finish(4)
    made = store.finish(2, version=3)
    store.close()
    store = Keeper(path)
    assert store.go_back(0) == [key(4), key(2)]
    again = store.waiting[1]
    assert (again.task_id, again.source) == ("task-2", "letters")
    for one, other in zip(again.trajectories, made.trajectories, strict=True):
        assert (one.key, one.reward, one.truncated, one.error) == (other.key, other.reward, other.truncated, other.error)
        for name in ("token_ids", "generated", "loss_mask", "logprobs", "versions", "kv_versions"):
            a, b = getattr(one.rows[0], name), getattr(other.rows[0], name)
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
    assert [fact for fact in store.facts() if isinstance(fact, Admitted)] == [Admitted(key(4), task(4)), Admitted(key(2), task(2))]


def test_an_unfinished_group_comes_back_with_ended_rollouts_and_recorded_turns(path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0, attempt=1))
    running, ended = RolloutKey(key(0, 1), 0), trajectory(key(0, 1), 1, reward=None)
    for number, made in enumerate((turn(1, 2), turn(3))):
        store.keep_turn(running, number, made)
        store.keep_turn(ended.key, number, made)
    store.keep(ended)
    store.close()
    (unfinished,) = Keeper(path).unfinished()
    assert unfinished.key == key(0, 1)
    assert unfinished.turns == {running: (turn(1, 2), turn(3))}
    assert [(t.key, t.reward) for t in unfinished.finished] == [(ended.key, None)]


def test_the_turns_of_a_retry_replace_those_of_the_try_before(path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0))
    running = RolloutKey(key(0), 0)
    for number, made in [(0, turn(1)), (1, turn(2)), (0, turn(3))]:
        store.keep_turn(running, number, made)
    (unfinished,) = store.unfinished()
    assert unfinished.turns == {running: (turn(3),)}


def test_a_finished_group_keeps_no_turns_of_rollouts_that_left_no_record(path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0))
    store.keep_turn(RolloutKey(key(0), 1), 0, turn(1))
    store.keep(trajectory(key(0), 0))
    store.finish_group(group(key(0), size=1))
    assert sqlite3.connect(path).execute("SELECT count(*) FROM turns").fetchone() == (0,)


def test_the_next_position_follows_the_last_admission_and_attempts_do_not_move_it(path: Path) -> None:
    store = Keeper(path)
    assert store.next_position() == (0, 0)
    for epoch, index in ((0, 5), (1, 0), (1, 1)):
        store.admit(GroupKey(epoch, index))
    store.close_group(key(5), Reason.STALE, successor=key(5, attempt=1))
    assert store.next_position() == (1, 2)


def test_i8_steps_up_to_the_checkpoint_are_final_and_later_ones_wait_again_exactly_once(path: Path) -> None:
    store = Keeper(path)
    groups = [store.finish(index) for index in range(4)]
    for version in range(3):
        store.lease(Batch(version + 1, version, (groups[version],)))
    store.done(1)
    store.done(2)
    assert store.go_back(1) == [key(1), key(2), key(3)]
    *_, carried = store.facts()
    assert isinstance(carried, CarriedOver) and (carried.trained, carried.highest_version, carried.num_leases) == (1, 3, 3)
    assert store.go_back(1) == [key(1), key(2), key(3)]


def test_i8_going_back_beyond_a_checkpoint_that_had_made_steps_final_takes_them_back(path: Path) -> None:
    store = Keeper(path)
    groups = [store.finish(index) for index in range(4)]
    for version in range(4):
        store.lease(Batch(version + 1, version, (groups[version],)))
        store.done(version + 1)
    store.apply(Checkpointed(2))
    store.apply(Checkpointed(3))
    before = store.fates
    assert store.go_back(1) == [key(1), key(2), key(3)]
    assert store.fates == {(Fate.TRAINED, None): 4, (Fate.WAITING, None): 12} and sum(before.values()) == 16
    *_, carried = store.facts()
    assert isinstance(carried, CarriedOver) and carried.trained == 1
    assert store.go_back(1) == [key(1), key(2), key(3)], "it may be said again"
    store.lease(Batch(5, 4, (groups[3], groups[1])))
    store.apply(Checkpointed(5))
    assert store.go_back(5) == [key(2)]


def test_i8_a_step_in_the_checkpoint_is_final_though_its_done_was_lost(path: Path) -> None:
    store = Keeper(path)
    store.lease(Batch(1, 6, (store.finish(0),)))
    assert store.go_back(7) == []
    assert store.fates == {(Fate.TRAINED, None): 4}


def test_while_the_trainer_lives_its_leases_stand(path: Path) -> None:
    store = Keeper(path)
    store.lease(Batch(1, 0, (store.finish(0),)))
    store.done(1)
    store.lease(Batch(2, 1, (store.finish(2), store.finish(1))))
    first, second = [fact.batch for fact in store.facts() if isinstance(fact, Leased)]
    assert (first.lease, [fact.lease for fact in store.facts() if isinstance(fact, Stepped)]) == (1, [1])
    assert (second.lease, second.train_version, [g.key for g in second.groups]) == (2, 1, [key(1), key(2)])
    store.done(2)
    store.apply(Checkpointed(2))
    assert store.go_back(2) == []


def test_a_trainer_that_restarts_gets_back_the_steps_its_checkpoint_lacks(path: Path) -> None:
    store = Keeper(path)
    for version in range(3):
        store.lease(Batch(version + 1, version, (store.finish(version),)))
    store.done(1)
    store.done(2)
    assert [g.key for g in store.groups_after(1)] == [key(1)], "the third was never done: living books have it as an open lease"
    assert store.go_back(1) == [key(1), key(2)]


def test_i8_a_group_cannot_be_leased_twice(path: Path) -> None:
    store = Keeper(path)
    made = store.finish(0)
    store.lease(Batch(1, 0, (made,)))
    with pytest.raises(AssertionError, match="I8"):
        store.lease(Batch(2, 1, (made,)))
    store.done(1)
    store.apply(Checkpointed(1))
    with pytest.raises(UnknownLease, match="Lease 1"):
        store.apply(TakenBack(1))


def test_i8_a_group_that_runs_cannot_be_admitted_again(path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0))
    with pytest.raises(AssertionError, match="I8"):
        store.admit(key(0))
    store.apply(Interrupted())
    store.admit(key(0))


def test_i8_a_lease_number_given_again_does_not_touch_groups_that_are_final(path: Path) -> None:
    store = Keeper(path)
    store.lease(Batch(1, 0, (store.finish(0),)))
    assert store.go_back(1) == []
    store.lease(Batch(1, 1, (store.finish(1),)))
    assert store.go_back(1) == [key(1)]
    assert store.fates == {(Fate.TRAINED, None): 4, (Fate.WAITING, None): 4}


def test_a_requeued_task_is_in_line_at_once(path: Path) -> None:
    store = Keeper(path)
    store.finish(0)
    store.close_group(key(0), Reason.REQUEUED, successor=key(0, attempt=1))
    assert store.go_back(0) == []
    assert [u.key for u in store.unfinished()] == [key(0, attempt=1)]
    assert store.fates == {(Fate.DROPPED, Reason.REQUEUED): 4}


def test_i3_a_skipped_step_ends_its_groups_and_its_lease(path: Path) -> None:
    store = Keeper(path)
    store.lease(Batch(1, 0, (store.finish(0),)))
    store.close_group(key(0), Reason.SKIPPED)
    store.done(1)
    assert store.fates == {(Fate.DROPPED, Reason.SKIPPED): 4}
    assert store.go_back(0) == [] and not [fact for fact in store.facts() if isinstance(fact, Leased)]
    assert store.fates == {(Fate.DROPPED, Reason.SKIPPED): 4}


def test_i3_every_token_of_an_ended_rollout_has_one_fate(path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0))
    store.keep(trajectory(key(0), 0, num_tokens=5), masked={Reason.NOT_POLICY_SAMPLED: 3}, dropped={Reason.OVERSHOOT: 2})
    store.keep(trajectory(key(0), 1, reward=None, num_tokens=7))
    store.keep(trajectory(key(0), 1, num_tokens=6))  # its retry
    store.finish_group(group(key(0)))
    decided = {(Fate.MASKED, Reason.NOT_POLICY_SAMPLED): 3, (Fate.DROPPED, Reason.OVERSHOOT): 2, (Fate.DROPPED, Reason.NO_REWARD): 7}
    assert store.fates == {**decided, (Fate.WAITING, None): 11}

    (whole,) = store.waiting
    store.lease(Batch(1, 4, (whole,)), masked={RolloutKey(key(0), 1): 6})
    assert store.fates == {**decided, (Fate.WAITING, None): 5, (Fate.MASKED, Reason.STALE): 6}
    store.done(1)
    assert store.fates == {**decided, (Fate.TRAINED, None): 5, (Fate.MASKED, Reason.STALE): 6}
    store.go_back(4)
    assert store.fates == {**decided, (Fate.WAITING, None): 11}


def test_facts_written_together_happen_all_or_not_at_all(path: Path) -> None:
    store = Keeper(path)
    with pytest.raises(UnknownLease):
        store.write([lambda s: s.apply(Admitted(key(0), task(0))), lambda s: s.apply(TakenBack(99))])
    assert store.next_position() == (0, 0)
    store.write([lambda s: s.apply(Admitted(key(0), task(0))), lambda s: s.apply(Checkpointed(0))])
    assert store.next_position() == (0, 1)


def test_a_file_of_another_run_is_refused(path: Path) -> None:
    Keeper(path).close()
    with pytest.raises(StoreCorrupt, match="belongs to run 'tests', not 'other'"):
        Keeper(path, run="other")


def test_a_file_that_is_no_store_is_refused_with_the_remedy(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(StoreCorrupt, match=r"store\.sqlite.*run folder"):
        Keeper(path)
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(StoreCorrupt, match="not a store of Midflight"):
        Keeper(path)


def test_a_newer_schema_is_refused_by_number(path: Path) -> None:
    Keeper(path).close()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(StoreCorrupt, match="schema is 99"):
        Keeper(path)


def test_damage_inside_the_file_is_an_error_not_a_wrong_answer(path: Path) -> None:
    store = Keeper(path)
    for index in range(200):
        store.finish(index)
    store.close()
    whole = bytearray(path.read_bytes())
    for at in range(4096, len(whole), 4096):  # every page but the first
        whole[at : at + 64] = bytes(64)
    path.write_bytes(whole)
    with pytest.raises(StoreCorrupt, match="restore the file"):
        assert Keeper(path).waiting


def test_a_full_disk_is_named_and_what_was_committed_stays(path: Path) -> None:
    store = Keeper(path)
    store.finish(0)
    store._db.execute("PRAGMA max_page_count = 30")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StoreFailed, match="free some space"):
        for index in range(1, 10_000):
            store.finish(index)
    store.close()
    assert Keeper(path).waiting[0].key == key(0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="permissions"):
        Keeper(tmp_path / "file" / "store.sqlite")


def test_what_a_reward_is_made_of_and_the_answers_of_tokens_come_back(path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0))
    numbered = replace(trajectory(key(0), 0).rows[0], turns=np.array([0, 0, 1], np.int32))
    told = replace(
        trajectory(key(0), 0),
        rows=(numbered,),
        components={"right": 1.0},
        metrics={"tools/calls": 2.0},
        turn_rewards=(0.5, 0.25),
        fields={"log": ["a", None]},
    )
    store.keep(told)
    store.close()
    ((found,),) = [each.finished for each in Keeper(path).unfinished()]
    assert (found.components, found.metrics, found.turn_rewards) == ({"right": 1.0}, {"tools/calls": 2.0}, (0.5, 0.25))
    assert found.fields == {"log": ["a", None]}
    assert found.rows[0].turns is not None and found.rows[0].turns.tolist() == [0, 0, 1]
