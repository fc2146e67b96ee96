"""The rollouts of one task together."""

import asyncio
from types import TracebackType
from typing import Protocol

from midflight.environments.rollout import FateSink
from midflight.types import GroupKey, Reason, RolloutKey, Task, Trajectory


class Rollouts(Protocol):
    """Runs one rollout. `RolloutRunner` implements it."""

    async def run(self, key: RolloutKey, task: Task) -> Trajectory: ...


class Slots(Protocol):
    """Limits the rollouts in flight, first come first served. `asyncio.Semaphore` implements it."""

    async def __aenter__(self) -> object: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> object: ...


class GroupRunner:
    """Runs groups, any number at once, within the shared `slots`."""

    def __init__(
        self, *, rollouts: Rollouts, slots: Slots, fates: FateSink, group_size: int, retries: int
    ) -> None:
        self._rollouts = rollouts
        self._slots = slots
        self._fates = fates
        self._group_size = group_size
        self._retries = retries

    async def run(self, key: GroupKey, task: Task) -> list[Trajectory]:
        """One trajectory for each sample, in their order, including those that stayed without a
        reward.

        Waits for all of them. It is ended by cancellation, or by an error priced at the run, which
        cancels the other samples.
        """
        async with asyncio.TaskGroup() as group:
            keys = [RolloutKey(key, sample) for sample in range(self._group_size)]
            running = [
                group.create_task(self._sample(of, task), name=f"rollout {of}") for of in keys
            ]
        return [task.result() for task in running]

    async def _sample(self, key: RolloutKey, task: Task) -> Trajectory:
        """Runs a rollout, again at most `retries` times while it has no reward. It keeps its slot,
        because its group is ageing.

        Waits for a slot, which another rollout's end frees. A retry has the same key and therefore
        the same seeds, in a new session. A rollout that the infrastructure let fail gives its
        tokens again, and an environment that fails by its own fault fails again, a bounded number
        of times.
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
