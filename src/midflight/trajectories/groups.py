"""When the rollouts of a task have ended: the group they make, or why they make none (DECISIONS 6)."""

from __future__ import annotations

from collections.abc import Iterable

from midflight.types import Group, GroupKey, Reason, Task, Trajectory


def collect(key: GroupKey, task: Task, *, trajectories: Iterable[Trajectory], min_size: int) -> Group | Reason:
    """The scored trajectories in the order of their samples, if there are at least `min_size`.

    A reward of `None` says that the infrastructure failed: it leaves the group and never becomes a number (I10).
    """
    scored = sorted((t for t in trajectories if t.reward is not None), key=lambda t: t.key.sample)
    if not scored:
        return Reason.NO_REWARD
    if len(scored) < min_size:
        return Reason.TOO_FEW
    return Group(key, task.id, task.source, tuple(scored))


def tokens_without_reward(trajectories: Iterable[Trajectory]) -> int:
    """Trainable tokens of trajectories that `collect` leaves out: dropped(no_reward)."""
    return sum(t.num_trainable for t in trajectories if t.reward is None)
