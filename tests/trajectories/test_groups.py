"""What group the rollouts of a task make."""

from __future__ import annotations

from midflight.trajectories import collect, tokens_without_reward
from midflight.types import Group, Reason

from .making import key, task, trajectory


def test_a_group_holds_the_scored_trajectories_in_the_order_of_their_samples() -> None:
    ended = [trajectory(key(3), 2, reward=0.0), trajectory(key(3), 0, reward=1.0), trajectory(key(3), 1, reward=None)]
    made = collect(key(3), task(3), trajectories=ended, min_size=2)
    assert isinstance(made, Group) and made.task_id == "task-3" and made.source == "letters"
    assert [(t.key.sample, t.reward) for t in made.trajectories] == [(0, 1.0), (2, 0.0)]
    assert tokens_without_reward(ended) == 2


def test_i10_a_failed_rollout_is_no_zero_and_too_few_scores_make_no_group() -> None:
    failed = [trajectory(key(0), i, reward=None) for i in range(3)]
    assert collect(key(0), task(0), trajectories=failed, min_size=1) is Reason.NO_REWARD
    assert collect(key(0), task(0), trajectories=[*failed[:2], trajectory(key(0), 2)], min_size=2) is Reason.TOO_FEW
    assert collect(key(0), task(0), trajectories=[], min_size=1) is Reason.NO_REWARD
