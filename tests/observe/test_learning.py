"""Lengths, truncation and the spread of rewards, worked out by hand."""

from __future__ import annotations

import math

import pytest
from tests.observe.facts import rollout

from midflight.observe.learning import Learning, deviation
from midflight.observe.status import LearningStatus
from midflight.types import Group, GroupKey, Kind, Reason, RolloutKey, Trajectory
from midflight.types.facts import GroupClosed, GroupFinished, TaskDrawn


def finished(*rewards: float) -> GroupFinished:
    key = GroupKey(0, 0)
    found = tuple(Trajectory(RolloutKey(key, sample), "t", "s", reward, ()) for sample, reward in enumerate(rewards))
    return GroupFinished(Group(key, "t", "s", found), order=1)


def test_nothing_is_known_before_the_first_rollout() -> None:
    assert Learning().status() == LearningStatus()


def test_lengths_are_of_rollouts_with_a_reward_and_evaluations_do_not_count() -> None:
    learning = Learning()
    rollout(learning, 1.0, num_tokens=10)
    rollout(learning, 0.0, num_tokens=30, truncated=True)
    rollout(learning, None, num_tokens=1000)
    rollout(learning, 1.0, num_tokens=1000, key=RolloutKey(GroupKey(0, 0), 0, Kind.EVALUATION))
    status = learning.status()
    assert (status.generated_length, status.truncated_share) == (20.0, 0.5)


def test_groups_that_are_all_alike_are_counted_whether_they_are_dropped_or_not() -> None:
    learning = Learning()
    learning.apply(finished(0.0, 1.0))
    learning.apply(finished(0.1, 0.1, 0.1))
    learning.apply(GroupClosed(GroupKey(0, 1), Reason.ZERO_SPREAD, 7))
    learning.apply(GroupClosed(GroupKey(0, 2), Reason.STALE, 7))
    status = learning.status()
    assert status.zero_spread_share == pytest.approx(2 / 3)
    assert status.reward_spread == pytest.approx(math.sqrt(0.5) / 3)


def test_refills_are_counted_by_why_and_tasks_by_the_pool_that_they_came_from() -> None:
    learning = Learning()
    for alike in ("passed", "failed", "failed"):
        learning.apply(GroupClosed(GroupKey(0, 1), Reason.ZERO_SPREAD, 7, alike=alike))
    learning.apply(TaskDrawn(GroupKey(0, 2), "unseen", {"unseen": 9, "hard": 1}, None))
    learning.apply(TaskDrawn(GroupKey(0, 3), "hard", {"unseen": 8, "hard": 2}, 0.25))
    assert learning.status().curriculum == {
        "drawn/hard": 1, "drawn/unseen": 1, "refilled/failed": 2, "refilled/passed": 1, "pool/unseen": 8, "pool/hard": 2, "pass_rate": 0.25
    }  # fmt: skip


def test_the_window_forgets() -> None:
    learning = Learning(2)
    for length in (100, 1, 3):
        rollout(learning, 1.0, num_tokens=length)
    assert learning.status().generated_length == 2.0


def test_the_deviation_of_equal_numbers_is_exactly_zero() -> None:
    assert deviation([0.1] * 7) == 0.0
    assert deviation([1.0, 2.0, 3.0]) == 1.0


def test_turns_components_and_metrics_are_means_over_the_rollouts_that_have_them() -> None:
    learning = Learning()
    rollout(learning, 1.0, num_turns=3, components={"right": 1.0}, metrics={"tools/calls": 2.0})
    rollout(learning, 0.5, num_turns=1, components={"right": 0.0, "short": 0.5})
    rollout(learning, None, num_turns=9, components={"right": 7.0})
    status = learning.status()
    assert (status.turns_mean, status.components, status.metrics) == (2.0, {"right": 0.5, "short": 0.5}, {"tools/calls": 2.0})
