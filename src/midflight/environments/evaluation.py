"""Held-out tasks, tried once each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from midflight.environments.group import Rollouts, Slots
from midflight.ports import Observer
from midflight.types import GroupKey, RolloutKey, Task, Trajectory, Version

EVALUATION_ATTEMPT = 2**20
"""Attempt number of every evaluation rollout. Training counts attempts from 0 and is bounded far below, so keys never meet."""


@dataclass(frozen=True, slots=True)
class SourceScore:
    """What an evaluation found on one source."""

    source: str
    mean_reward: float | None
    """Over the scored tasks; None if there is none (I10: a failure is no zero)."""
    num_scored: int
    num_failed: int
    """Tasks without reward; their errors are in the observer's `rollout_finished`."""

    @property
    def num_tasks(self) -> int:
        return self.num_scored + self.num_failed


def evaluation_key(position: int) -> RolloutKey:
    """Key of the task at this position of the list. The same in every evaluation, so that two of them differ by the weights alone."""
    return RolloutKey(GroupKey(epoch=0, index=position, attempt=EVALUATION_ATTEMPT), sample=0)


class Evaluator:
    """Runs evaluations. `rollouts` must be untracked: no token of theirs is trained on."""

    def __init__(self, *, rollouts: Rollouts, slots: Slots, observer: Observer) -> None:
        self._rollouts = rollouts
        self._slots = slots
        self._observer = observer

    async def run(self, tasks: Sequence[Task], *, version: Version) -> tuple[SourceScore, ...]:
        """Scores of each source in order of appearance. Waits for all rollouts, each ended by its deadline; cancellation ends all.

        `version` labels the results: the one the engines attest while this runs.
        """
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._try(evaluation_key(i), task), name=f"evaluation {i}") for i, task in enumerate(tasks)]
        scores = _scores(task.result() for task in running)
        for score in scores:
            if score.mean_reward is not None:
                self._observer.evaluated(version=version, source=score.source, num_tasks=score.num_scored, mean_reward=score.mean_reward)
        return scores

    async def _try(self, key: RolloutKey, task: Task) -> Trajectory:
        """Waits for a slot, freed by another rollout's end, and for the rollout."""
        async with self._slots:
            return await self._rollouts.run(key, task)


def _scores(trajectories: Iterable[Trajectory]) -> tuple[SourceScore, ...]:
    rewards: dict[str, list[float | None]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.source, []).append(trajectory.reward)
    return tuple(_score(source, found) for source, found in rewards.items())


def _score(source: str, rewards: Sequence[float | None]) -> SourceScore:
    scored = [reward for reward in rewards if reward is not None]
    mean = math.fsum(scored) / len(scored) if scored else None
    return SourceScore(source=source, mean_reward=mean, num_scored=len(scored), num_failed=len(rewards) - len(scored))
