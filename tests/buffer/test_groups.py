"""What group the rollouts of a task make."""

from __future__ import annotations

from dataclasses import replace

from midflight.buffer.books import Books
from midflight.types import Group, Reason, Task

from .making import group, key, limits

TASK = Task("task-3", "letters")


def test_a_group_holds_the_scored_trajectories_in_the_order_of_their_samples() -> None:
    first, second, third = group(key(3), (0,), (0,), (0,)).trajectories
    made = Group.of(key(3), TASK, [third, first, replace(second, reward=None)])
    assert made.task_id == "task-3" and made.source == "letters"
    assert [(t.key.sample, t.reward) for t in made.trajectories] == [(0, 0.0), (2, 2.0)]


def test_i10_a_failed_rollout_is_no_zero_and_too_few_scores_make_no_group() -> None:
    books = Books(limits(1, 0, n=3, min_group_size=2))
    scored, *failed = group(key(3), (0,), (0,), (0,)).trajectories
    failed = [replace(t, reward=None) for t in failed]
    assert books.unfit(Group.of(key(3), TASK, failed)) is Reason.NO_REWARD
    assert books.unfit(Group.of(key(3), TASK, [*failed, scored])) is Reason.TOO_FEW
    assert books.unfit(Group.of(key(3), TASK, [])) is Reason.NO_REWARD
