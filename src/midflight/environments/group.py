"""The rollouts of one task, run together."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol

from midflight.environments.rollout import FateSink
from midflight.types import GroupKey, Reason, RolloutKey, Task, Trajectory


class Rollouts(Protocol):
    """What runs one rollout; `RolloutRunner` is one."""

    async def run(self, key: RolloutKey, task: Task) -> Trajectory: ...


class Slots(Protocol):
    """Limits the rollouts in flight, first come first served; `asyncio.Semaphore` is one."""

    async def __aenter__(self) -> object: ...
    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> object: ...


class GroupRunner:
    """Runs groups, any number at once, within the shared `slots`."""

    def __init__(self, *, rollouts: Rollouts, slots: Slots, fates: FateSink, group_size: int, retries: int) -> None:
        self._rollouts = rollouts
        self._slots = slots
        self._fates = fates
        self._group_size = group_size
        self._retries = retries

    async def run(self, key: GroupKey, task: Task) -> list[Trajectory]:
        """One trajectory for each sample, in their order; those that stayed without reward are among them.

        Waits for all of them; ended by cancellation, or by an error priced at the run, which cancels the other samples.
        """
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._sample(RolloutKey(key, sample), task), name=f"rollout {RolloutKey(key, sample)}")
                for sample in range(self._group_size)
            ]
        return [task.result() for task in running]

    async def _sample(self, key: RolloutKey, task: Task) -> Trajectory:
        """A rollout, tried again at most `retries` times while it has no reward. It keeps its slot: its group is ageing.

        Waits for a slot, freed by another rollout's end. A retry has the same key, hence the same seeds, in a new session: what
        failed by infrastructure gives its tokens again, and an environment that fails by its own fault fails again, a bounded time.
        """
        async with self._slots:
            trajectory = await self._rollouts.run(key, task)
            for _ in range(self._retries):
                if trajectory.reward is not None:
                    break
                if trajectory.rows:
                    self._fates.rows_discarded(key, trajectory.rows, reason=Reason.NO_REWARD)
                trajectory = await self._rollouts.run(key, task)
            return trajectory
