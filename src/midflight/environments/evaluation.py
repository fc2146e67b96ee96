"""Held-out tasks, tried once each, all by one version."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from midflight.environments.rollout import Slots
from midflight.types import GroupKey, Kind, RolloutKey, Task, Trajectory, Version
from midflight.types.facts import Evaluated, EvaluationKept, Record, RolloutEnded

UNFINISHED = "its evaluation was over first: a new version came, or the engine fell out that served the old one"
"""Error of a rollout that was ended with its evaluation."""


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
    """Tasks without reward."""
    error: str | None = None
    """Why the first of them has none; each says so in its `RolloutEnded`."""

    @property
    def num_tasks(self) -> int:
        return self.num_scored + self.num_failed


def evaluation_key(position: int) -> RolloutKey:
    """Key of the task at this position of the list. The same in every evaluation, so that two of them differ by the weights alone."""
    return RolloutKey(GroupKey(epoch=0, index=position), sample=0, kind=Kind.EVALUATION)


class Evaluator:
    """Runs evaluations. `rollouts` must be untracked: no token of theirs is trained on."""

    def __init__(self, *, rollouts: RolloutsOfOneVersion, slots: Slots, record: Record, keep: int = 0) -> None:
        """`keep`: rollouts of each source that are kept of an evaluation, those of its first tasks: the same in each, to be compared."""
        self._rollouts = rollouts
        self._slots = slots
        self._record = record
        self._keep = keep

    async def run(self, tasks: Sequence[Task], *, version: Version, over: asyncio.Event | None = None) -> tuple[SourceScore, ...]:
        """Scores of each source in order of appearance. Waits for all rollouts, each ended by its deadline; cancellation ends all.

        Every scored task was answered by `version` alone. `over`, once set, ends what is unfinished: those tasks have failed.
        """
        started = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            kept, seen = set[int](), Counter[str]()
            for i, task in enumerate(tasks):
                kept |= {i} if seen[task.source] < self._keep else set()
                seen[task.source] += 1
            running = [
                group.create_task(self._try(i, task, version=version, keep=i in kept), name=f"evaluation {i}")
                for i, task in enumerate(tasks)
            ]
            ending = group.create_task(_end(running, over or asyncio.Event()))
            await asyncio.gather(*running, return_exceptions=True)
            ending.cancel()
        seconds = asyncio.get_running_loop().time() - started
        scores = _scores(
            self._unfinished(i, tasks[i], seconds=seconds) if rollout.cancelled() else rollout.result() for i, rollout in enumerate(running)
        )
        for score in scores:
            self._record(Evaluated(version, score.source, score.num_scored, score.mean_reward, score.num_failed, score.error))
        return scores

    async def _try(self, position: int, task: Task, *, version: Version, keep: bool) -> Trajectory:
        """Waits for a slot, freed by another rollout's end, and for the rollout."""
        async with self._slots:
            made = await self._rollouts.run(evaluation_key(position), task, version=version)
        if keep:
            self._record(EvaluationKept(version, task, made))
        return made

    def _unfinished(self, position: int, task: Task, *, seconds: float) -> Trajectory:
        """What a rollout left that was ended; `seconds` since the evaluation began."""
        key, error = evaluation_key(position), UNFINISHED
        self._record(RolloutEnded(key, task.source, reward=None, num_tokens=0, num_versions=0, seconds=seconds, error=error))
        return Trajectory(key, task.id, task.source, reward=None, rows=(), error=error, seconds=seconds)


async def _end(rollouts: Sequence[asyncio.Task[Trajectory]], over: asyncio.Event) -> None:
    """Waits for the evaluation to be over; ended with it."""
    await over.wait()
    for rollout in rollouts:
        rollout.cancel()


def _scores(trajectories: Iterable[Trajectory]) -> tuple[SourceScore, ...]:
    by_source: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_source.setdefault(trajectory.source, []).append(trajectory)
    return tuple(_score(source, found) for source, found in by_source.items())


def _score(source: str, found: Sequence[Trajectory]) -> SourceScore:
    rewards = [trajectory.reward for trajectory in found if trajectory.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    error = next((trajectory.error for trajectory in found if trajectory.error is not None), None)
    return SourceScore(source=source, mean_reward=mean, num_scored=len(rewards), num_failed=len(found) - len(rewards), error=error)
