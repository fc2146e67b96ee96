"""The rules of age as pure functions, by hand."""

from __future__ import annotations

import pytest

from midflight.buffer.staleness import ages, credit, overfull, surplus

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
    ("finished", "shed"),
    [
        ([3, 3, 4, 4, 5, 5], 0),  # two each for the steps at 5, 6 and 7
        ([2], 1),  # age 3 at step 5, whatever else
        ([2, 3, 3], 1),
        ([3, 3, 3], 1),  # three for one batch of two
        ([2, 3, 3, 3, 5], 2),
        ([4, 4, 4, 4, 4], 1),  # five for the steps at 5 and 6
    ],
)
def test_groups_that_no_batch_can_take_in_time_are_counted(finished: list[int], shed: int) -> None:
    assert surplus(finished, 5, max_staleness=2, groups_per_step=2) == shed


def test_ages_count_trainable_tokens_by_versions_before_the_step() -> None:
    made = group(key(0), (3, 3, 4), (5,))
    assert ages(made.trajectories, 5) == {2: 2, 1: 1, 0: 1}
