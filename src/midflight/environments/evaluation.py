"""Held-out tasks, tried once each, all by one version."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from midflight.environments.group import Slots
from midflight.ports import Observer
from midflight.types import GroupKey, RolloutKey, Task, Trajectory, Version

EVALUATION_ATTEMPT = 2**20
"""Attempt number of every evaluation rollout. Training counts attempts from 0 and is bounded far below, so keys never meet."""


class RolloutsOfOneVersion(Protocol):
    """What runs one rollout; `RolloutRunner` is one."""

    async def run(self, key: RolloutKey, task: Task, *, version: Version) -> Trajectory:
        """Without reward, and with an error that says so, where any of its tokens is of another version."""
        ...


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

    def __init__(self, *, rollouts: RolloutsOfOneVersion, slots: Slots, observer: Observer) -> None:
        self._rollouts = rollouts
        self._slots = slots
        self._observer = observer

    async def run(self, tasks: Sequence[Task], *, version: Version, over: asyncio.Event | None = None) -> tuple[SourceScore, ...]:
        """Scores of each source in order of appearance. Waits for all rollouts, each ended by its deadline; cancellation ends all.

        Every scored task was answered by `version` alone. `over`, once set, ends what is unfinished: those tasks have failed.
        """
        started = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._try(i, task, version=version), name=f"evaluation {i}") for i, task in enumerate(tasks)]
            ending = group.create_task(_end(running, over or asyncio.Event()))
            await asyncio.gather(*running, return_exceptions=True)
            ending.cancel()
        for i in (i for i, rollout in enumerate(running) if rollout.cancelled()):
            self._tell_unfinished(i, tasks[i], seconds=asyncio.get_running_loop().time() - started)
        scores = _scores((task.source, None if tried.cancelled() else tried.result()) for task, tried in zip(tasks, running, strict=True))
        for score in scores:
            if score.mean_reward is not None:
                self._observer.evaluated(version=version, source=score.source, num_tasks=score.num_scored, mean_reward=score.mean_reward)
        return scores

    async def _try(self, position: int, task: Task, *, version: Version) -> float | None:
        """Waits for a slot, freed by another rollout's end, and for the rollout."""
        async with self._slots:
            return (await self._rollouts.run(evaluation_key(position), task, version=version)).reward

    def _tell_unfinished(self, position: int, task: Task, *, seconds: float) -> None:
        self._observer.rollout_finished(
            key=evaluation_key(position),
            source=task.source,
            reward=None,
            num_tokens=0,
            num_versions=0,
            seconds=seconds,
            error="its evaluation was over first: a new version came, or the engine fell out that served the old one",
        )


async def _end(rollouts: Sequence[asyncio.Task[float | None]], over: asyncio.Event) -> None:
    await over.wait()
    for rollout in rollouts:
        rollout.cancel()


def _scores(found: Iterable[tuple[str, float | None]]) -> tuple[SourceScore, ...]:
    rewards: dict[str, list[float | None]] = {}
    for source, reward in found:
        rewards.setdefault(source, []).append(reward)
    return tuple(_score(source, of_source) for source, of_source in rewards.items())


def _score(source: str, rewards: Sequence[float | None]) -> SourceScore:
    scored = [reward for reward in rewards if reward is not None]
    mean = math.fsum(scored) / len(scored) if scored else None
    return SourceScore(source=source, mean_reward=mean, num_scored=len(scored), num_failed=len(rewards) - len(scored))
