"""The rules of age as pure functions, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from midflight.buffer.staleness import Lineage, ages, credit, overfull, surplus

from .making import group, key


def allowed(open_groups: int, next_version: int, served_version: int, s: int, b: int) -> int:
    return credit(open_groups=open_groups, next_version=next_version, served_version=served_version, max_staleness=s, groups_per_step=b)


def test_credit_is_the_capacity_formula_less_what_is_already_in_batches() -> None:
    # submitted - released = 12 open + 5 * 4 trained = 32 <= (5 + 2 + 1) * 4 = 32: no more.
    assert allowed(open_groups=12, next_version=5, served_version=5, s=2, b=4) == 0
    assert allowed(open_groups=11, next_version=5, served_version=5, s=2, b=4) == 1


def test_an_engine_one_version_behind_costs_one_batch_of_credit() -> None:
    assert allowed(open_groups=0, next_version=5, served_version=5, s=2, b=4) == 12
    assert allowed(open_groups=0, next_version=5, served_version=4, s=2, b=4) == 8


def test_without_staleness_one_batch_is_admitted_per_version_and_nothing_is_prefetched() -> None:
    assert allowed(open_groups=0, next_version=3, served_version=3, s=0, b=4) == 4
    assert allowed(open_groups=4, next_version=3, served_version=3, s=0, b=4) == 0
    assert allowed(open_groups=0, next_version=4, served_version=3, s=0, b=4) == 0


def test_a_served_version_beyond_a_restarted_trainer_gives_no_extra_credit() -> None:
    assert allowed(open_groups=0, next_version=5, served_version=9, s=1, b=2) == 4


@pytest.mark.parametrize(
    ("left", "overfull_at"),
    [
        ([], None),
        ([3], 3),  # k = 0: a token of version v - S left behind would be too old at the next step
        ([4, 4], None),  # k = 1: at most B = 2 of version <= 4
        ([4, 4, 4], 4),
        ([4, 4, 5, 5], None),  # k = 2: at most 4 of version <= 5
        ([4, 5, 5, 5, 5], 5),
        ([5, 5, 5, 5], None),
        ([6] * 100, None),  # younger than the trainer's version: no rule speaks of them
    ],
)
def test_a_batch_is_taken_only_if_the_rest_fits_the_batches_before_each_deadline(left: list[int], overfull_at: int | None) -> None:
    assert overfull(left, 5, max_staleness=2, groups_per_step=2) == overfull_at


@pytest.mark.parametrize(
    ("finished", "shed"),  # in the order of finishing
    [
        ([3, 3, 4, 4, 5, 5], []),  # two each for the steps at 5, 6 and 7
        ([2], [0]),  # age 3 at step 5, whatever else
        ([2, 3, 3], [0]),
        ([3, 3, 3], [2]),  # three for one batch of two
        ([2, 3, 3, 3, 5], [0, 3]),
        ([4, 4, 4, 4, 4], [4]),  # five for the steps at 5 and 6
        ([3, 3, 4, 4, 5, 4], [5]),  # whichever was last of those that are too many, not the oldest
        ([5, 4, 4, 3, 4, 4, 3, 3], [5, 6, 7]),
    ],
)
def test_of_groups_that_no_batch_can_take_in_time_the_last_to_finish_are_shed(finished: list[int], shed: list[int]) -> None:
    ordered = [(oldest, order) for order, oldest in enumerate(finished)]
    assert surplus(reversed(ordered), 5, max_staleness=2, groups_per_step=2) == set(shed)


def test_ages_count_trainable_tokens_by_versions_before_the_step() -> None:
    made = group(key(0), (3, 3, 4), (5,))
    assert ages(made.trajectories, 5) == {2: 2, 1: 1, 0: 1}


def renumbered(lineage: Lineage, *versions: int) -> list[int]:
    return lineage.renumbered(np.array(versions, np.int32)).tolist()


def test_numbers_that_were_skipped_do_not_age_what_was_sampled_before() -> None:
    # Version 50 goes on as 76: 48 was two steps before it, and 53 will be made again as 79.
    lineage = Lineage().forked(50, 76)
    assert renumbered(lineage, 48, 50, 53, 76, 78) == [74, 76, 79, 76, 78]
    # It dies again with nothing saved: 50, and so 76, goes on as 81. 78, two steps after 76, is to be 83.
    again = lineage.forked(50, 81)
    assert renumbered(again, 48, 50, 53, 76, 78, 81) == [79, 81, 84, 81, 83, 81]
    # Or with 78 saved, as 79 of which 80 was lost.
    assert renumbered(lineage.forked(78, 81), 50, 53, 78, 80) == [79, 82, 81, 83]


def test_a_trainer_that_goes_on_under_the_same_number_moves_nothing() -> None:
    assert Lineage().forked(7, 7) == Lineage()


def test_a_group_that_runs_may_be_as_old_as_its_later_tokens() -> None:
    lineage = Lineage().forked(50, 76)
    assert lineage.between(48) == (74, 74)
    assert lineage.between(53) == (76, 79), "its next token may be of version 76"
    assert lineage.between(77) == (77, 77)


def test_a_token_of_a_way_that_was_lost_counts_as_of_age_0() -> None:
    assert ages(group(key(0), (3, 5, 6)).trajectories, 5) == {2: 1, 0: 2}
