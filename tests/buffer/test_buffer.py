"""What `Books` admit, keep, drop and hand out, by hand."""

from __future__ import annotations

import pytest

from midflight.buffer.books import Wait
from midflight.errors import OutOfTurn, UnknownLease
from midflight.types import Group, GroupKey, Reason, StalePolicy
from midflight.types.facts import Checkpointed, GroupClosed, Interrupted, WentBack

from .keeping import Keeper
from .making import group, key, limits


def test_groups_of_oldest_version_go_first_and_ties_by_finish_in_the_order_of_their_keys() -> None:
    bench = Keeper(limits(2, 1), start_version=1)
    bench.admit_all()
    for index, version in ((3, 1), (2, 1), (1, 0), (0, 1)):
        bench.put(group(key(index), (version,)))
    assert [g.key for g in bench.batch(1).groups] == [key(1), key(3)]


def test_a_straggler_that_would_grow_too_old_is_waited_for_by_name() -> None:
    bench = Keeper(limits(1, 1), start_version=1)
    bench.admit_all()
    bench.put(group(key(0), (1,)))
    wait = bench.take(1, {key(1): 0})
    assert isinstance(wait, Wait) and wait.for_whom == "stragglers" and "0-1-0" in wait.detail
    bench.put(group(key(1), (0, 1)))
    assert [g.key for g in bench.batch(1).groups] == [key(1)]


def test_a_running_group_without_a_token_is_not_waited_for() -> None:
    bench = Keeper(limits(1, 0), start_version=3)
    bench.waiting(group(key(9), (3,)))
    assert bench.batch(3, {key(0): None}).groups[0].key == key(9)


def test_an_over_age_group_that_still_runs_is_not_waited_for_as_it_cannot_be_trained() -> None:
    bench = Keeper(limits(1, 1), start_version=5)
    bench.admit_all()
    bench.put(group(key(0), (5,)))
    assert bench.batch(5, {key(1): 3}).groups[0].key == key(0)


def test_too_few_finished_groups_wait_for_generation() -> None:
    bench = Keeper(limits(2, 0))
    bench.admit_all()
    bench.put(group(key(0), (0,)))
    wait = bench.take(0)
    assert isinstance(wait, Wait) and wait.for_whom == "generation" and "1 of 2" in wait.detail


def test_a_prompt_is_drawn_only_when_there_is_credit() -> None:
    bench = Keeper(limits(2, 0))
    assert bench.admit_all() == [key(0), key(1)]
    assert bench.drawn == 2
    wait = bench.admit()
    assert isinstance(wait, Wait) and wait.for_whom == "trainer" and bench.drawn == 2


def test_admission_waits_for_the_handover_once_the_step_is_made_but_not_served() -> None:
    bench = Keeper(limits(1, 0))
    bench.put(group(bench.admit_all()[0], (0,)))
    bench.done(bench.batch(0).lease)
    wait = bench.admit()
    assert isinstance(wait, Wait) and wait.for_whom == "handover"
    bench.serve(1)
    assert bench.admit_all() == [key(1)]


def test_a_full_buffer_stops_admission_whatever_the_credit() -> None:
    bench = Keeper(limits(1, 8, buffer_groups=2))
    for _ in range(2):
        started = bench.admit()
        assert isinstance(started, GroupKey)
        bench.put(group(started, (0,)))
    wait = bench.admit()
    assert isinstance(wait, Wait) and wait.for_whom == "trainer" and "buffer_groups" in wait.detail


def test_finished_rollouts_that_fill_the_memory_allowed_stop_admission_until_a_step_is_done() -> None:
    each = group(key(0), (0,) * 9).trajectories[0].num_bytes
    assert each == 10 * 18, "a row of ten tokens"
    bench = Keeper(limits(2, 8, n=2, buffer_bytes=4 * each))
    for index in range(3):
        bench.admit()
        bench.put(group(key(index), (0,) * 9, ()))
    assert bench.books.admission() is None and bench.books.num_bytes == 3 * each
    bench.admit()
    bench.keep(group(key(3), (0,) * 9))  # of a group that still runs
    wait = bench.books.admission()
    assert isinstance(wait, Wait) and wait.for_whom == "trainer"
    assert wait.detail == f"finished rollouts hold {4 * each} bytes of {4 * each} that they may"
    batch = bench.batch(0)
    assert bench.books.admission() == wait, "what is leased is still in memory"
    bench.done(batch.lease)
    assert bench.books.admission() is None and bench.books.num_bytes == 2 * each
    bench.record(WentBack(0, 0, batch.groups))
    assert bench.books.num_bytes == 4 * each


def test_memory_is_no_reason_to_wait_where_less_than_a_batch_is_open() -> None:
    bench = Keeper(limits(2, 1, buffer_bytes=1))
    bench.admit()
    bench.put(group(key(0), (0,) * 99))
    assert bench.books.admission() is None, "or the step would wait for a second group for ever"
    bench.admit()
    assert bench.books.admission() is not None


def test_slots_are_counted_in_rollouts_and_freed_one_by_one() -> None:
    bench = Keeper(limits(4, 4, n=2, max_in_flight=4))
    first, _ = bench.admit_all()
    bench.free(first)
    wait = bench.admit()
    assert isinstance(wait, Wait) and wait.for_whom == "slots"
    bench.free(first)
    assert bench.admit_all() == [key(2)]


def test_groups_without_spread_are_dropped_and_replaced_when_asked() -> None:
    for asked, reasons in ((True, [Reason.ZERO_SPREAD]), (False, [])):
        bench = Keeper(limits(1, 0, n=2, drop_zero_spread=asked))
        bench.put(group(bench.admit_all()[0], (0,), (0,), rewards=(1.0, 1.0)))
        assert [c.reason for c in bench.closed] == reasons
        assert bool(bench.admit_all()) == asked


def test_groups_below_the_minimum_or_without_a_trainable_token_are_dropped() -> None:
    bench = Keeper(limits(2, 0, n=4, min_group_size=2))
    first, second = bench.admit_all()
    bench.put(group(first, (0,)))
    bench.put(group(second, (), ()))
    assert [(c.key, c.reason) for c in bench.closed] == [(first, Reason.TOO_FEW), (second, Reason.TOO_FEW)]


def test_drop_takes_the_trajectory_out_of_the_gradient_and_leaves_its_reward_in_the_baseline() -> None:
    bench = Keeper(limits(1, 1, StalePolicy.DROP, n=2), start_version=5)
    bench.put(group(bench.admit_all()[0], (3, 4, 5), (4, 5)))
    (kept,) = bench.batch(5).groups
    assert [len(t.rows) for t in kept.trajectories] == [0, 1]
    assert [t.reward for t in kept.trajectories] == [0.0, 1.0]
    assert bench.books.tokens.dropped == {Reason.STALE: 3}


def test_drop_replaces_a_group_that_has_no_row_left() -> None:
    bench = Keeper(limits(1, 1, StalePolicy.DROP, n=2), start_version=5)
    started = bench.admit_all()[0]
    bench.put(group(started, (3,), (2, 5)))
    assert isinstance(bench.take(5), Wait)
    assert bench.closed == [GroupClosed(started, Reason.STALE, 3)]
    assert isinstance(bench.admit(), GroupKey)


def test_mask_keeps_over_age_tokens_as_context_and_drops_rows_without_a_trainable_token() -> None:
    bench = Keeper(limits(1, 1, StalePolicy.MASK, n=2), start_version=5)
    bench.put(group(bench.admit_all()[0], (3, 3, 4, 5), (2, 3)))
    (kept,) = bench.batch(5).groups
    assert kept.trajectories[0].rows[0].loss_mask.tolist() == [False, False, False, True, True]
    assert kept.trajectories[0].rows[0].generated.tolist() == [False, True, True, True, True]
    assert kept.trajectories[1].rows == ()
    tokens = bench.books.tokens
    assert tokens.masked == {Reason.STALE: 2} and tokens.dropped == {Reason.STALE: 2}


def test_requeue_puts_the_task_in_front_as_its_next_attempt_and_drops_it_after_the_last() -> None:
    bench = Keeper(limits(1, 0, StalePolicy.REQUEUE), start_version=5)
    bench.put(group(bench.admit_all()[0], (4,)))
    bench.take(5)
    assert bench.closed == [GroupClosed(key(0), Reason.REQUEUED, 1, successor=key(0, attempt=1))]
    assert bench.admit() == key(0, attempt=1)
    bench.put(group(key(0, attempt=1), (4,)))
    bench.take(5)
    assert bench.closed[1] == GroupClosed(key(0, attempt=1), Reason.STALE, 1)
    assert bench.admit() == key(1)


def test_under_wait_groups_that_a_crash_left_too_old_or_too_many_are_tried_again_never_trained() -> None:
    bench = Keeper(limits(1, 1), start_version=5)
    bench.waiting(group(key(0), (3,)), group(key(1), (4,)), group(key(2), (4,)), group(key(3), (5,)))
    assert [g.key for g in bench.batch(5).groups] == [key(1)]
    assert [(c.key, c.successor) for c in bench.closed] == [(key(0), key(0, 1)), (key(2), key(2, 1))], "the last to finish of too many"


def test_a_lease_asked_for_again_is_the_same_batch_until_it_is_done() -> None:
    bench = Keeper(limits(1, 0))
    bench.put(group(bench.admit_all()[0], (0,)))
    batch = bench.batch(0)
    assert bench.batch(0) is batch
    bench.done(batch.lease)
    with pytest.raises(OutOfTurn, match="version 0"):
        bench.take(0)
    with pytest.raises(UnknownLease, match=f"Lease {batch.lease}"):
        bench.done(batch.lease)


def test_i8_a_batch_whose_trainer_died_goes_back_to_its_place_and_out_again() -> None:
    bench = Keeper(limits(1, 1))
    for started in bench.admit_all():
        bench.put(group(started, (0,)))
    batch = bench.batch(0)
    bench.take_back(batch.lease)
    again = bench.batch(0)
    assert [g.key for g in again.groups] == [g.key for g in batch.groups] == [key(0)]
    assert again.lease != batch.lease


def test_i3_a_skipped_step_drops_its_tokens_and_makes_its_version_all_the_same() -> None:
    bench = Keeper(limits(1, 0))
    bench.put(group(bench.admit_all()[0], (0, 0)))
    bench.skip(bench.batch(0).lease, version=1)
    assert bench.closed == [GroupClosed(key(0), Reason.SKIPPED, 2)]
    assert (bench.books.trained, bench.books.tokens.trained, bench.books.tokens.dropped) == (0, 0, {Reason.SKIPPED: 2})
    bench.serve(1)
    bench.put(group(bench.admit_all()[0], (1,)))
    assert bench.batch(1).groups[0].key == key(1)


def test_i8_groups_trained_beyond_the_last_checkpoint_wait_again_for_the_new_trainer() -> None:
    bench = Keeper(limits(1, 8))
    groups = [group(started, (0,)) for started in bench.admit_all()[:3]]
    for made in groups:
        bench.put(made)
    for version in range(2):
        bench.done(bench.batch(version).lease)
    bench.record(Checkpointed(1))
    bench.batch(2)
    assert bench.books.learnt_after(1) == {groups[1].key} and bench.books.resumed_as(1) == 4
    bench.record(WentBack(1, 4, (groups[1],)))
    assert bench.books.trained == 1
    assert bench.batch(4).groups[0].key == groups[1].key, "in their old places"
    assert bench.batch(5).groups[0].key == groups[2].key


def test_what_waits_after_a_trainer_went_back_is_trained_whole_however_many_numbers_were_lost() -> None:
    bench, trained = Keeper(limits(2, 1)), list[GroupKey]()
    waited = list[Group]()
    for version in range(10):
        bench.serve(version)
        for started in bench.admit_all():
            bench.put(group(started, (version, version)))
        batch = bench.batch(version)
        waited += batch.groups if version >= 3 else ()
        bench.done(batch.lease, version + 1)
    bench.record(Checkpointed(3))
    bench.record(WentBack(3, 21, tuple(waited)))
    for version in range(21, 28):
        trained += (g.key for g in bench.batch(version).groups)
        assert max(bench.leased.staleness) <= 1, "I2"
    assert sorted(trained) == sorted(g.key for g in waited) and not bench.closed
    assert isinstance(bench.books.admission(), Wait), "nothing new beyond what is due"
    bench.serve(28)
    assert bench.admit_all() == [key(22), key(23)]


def test_a_checkpoint_keeps_its_number_unless_a_later_one_was_handed_out() -> None:
    bench = Keeper(limits(1, 4), start_version=3)
    assert bench.books.resumed_as(3) == 3
    bench.put(group(bench.admit_all()[0], (3,)))
    bench.take_back(bench.batch(3).lease)
    assert bench.books.resumed_as(3) == 5, "the step that was taken back may have published version 4"


def test_what_ran_when_the_process_died_starts_again_before_any_new_task() -> None:
    bench = Keeper(limits(2, 0))
    assert bench.admit_all() == [key(0), key(1)]
    bench.record(Interrupted())
    assert bench.books.submitted == 0 and bench.admit_all() == [key(0), key(1)]


@pytest.mark.parametrize("policy", [StalePolicy.DROP, StalePolicy.MASK])
def test_i3_a_batch_that_is_taken_back_gets_back_what_the_stale_policy_took_out(policy: StalePolicy) -> None:
    bench = Keeper(limits(1, 1, policy, n=2), start_version=5)
    bench.put(group(bench.admit_all()[0], (3, 5), (4,)))
    lease = bench.batch(5).lease
    assert bench.books.tokens.masked.total() + bench.books.tokens.dropped.total() == (2 if policy is StalePolicy.DROP else 1)
    bench.take_back(lease)
    assert not bench.books.tokens.masked and not bench.books.tokens.dropped and bench.books.tokens_waiting == 3
