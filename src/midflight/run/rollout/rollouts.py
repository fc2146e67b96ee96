"""The stream of rollouts: groups are started as admission allows, and handed to the buffer when they are durable.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Rollouts.run` | tasks | admission of the next group | the queue: a step taken, a version served, a rollout ended |
| `Rollouts._group` (one each) | its rollouts | their ends, then the store | the rollouts' deadlines; the store's writer |
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from types import TracebackType

from midflight.buffer.queue import GroupQueue
from midflight.environments.rollout import GroupRunner, RolloutRunner
from midflight.environments.tasks import SeededStream
from midflight.errors import RunFailed
from midflight.run.rollout.ages import GroupAges
from midflight.run.rollout.records import Records
from midflight.trajectories.groups import collect
from midflight.types import Group, GroupKey, Reason, RolloutKey, Row, Task, Trajectory
from midflight.types.facts import GroupFinished, Record

MAX_FAILED_GROUPS = 8
"""Groups in a row of which not one rollout got a reward. More is no bad luck: the environment or the engines are broken."""


class Fates:
    """Tokens that no trajectory carries on, by rollout and reason, until their group ends (I3)."""

    def __init__(self) -> None:
        self._masked: defaultdict[RolloutKey, Counter[Reason]] = defaultdict(Counter)
        self._dropped: defaultdict[RolloutKey, Counter[Reason]] = defaultdict(Counter)

    def session_closed(self, key: RolloutKey, *, masked: Mapping[Reason, int], dropped: Mapping[Reason, int]) -> None:
        self._masked[key].update(masked)
        self._dropped[key].update(dropped)

    def rows_discarded(self, key: RolloutKey, rows: tuple[Row, ...], *, reason: Reason) -> None:
        self._dropped[key][reason] += sum(row.num_trainable for row in rows)

    def of(self, key: RolloutKey) -> tuple[Mapping[Reason, int], Mapping[Reason, int]]:
        """(masked, dropped) of a rollout so far."""
        return self._masked[key], self._dropped[key]

    def settle(self, keys: Iterable[RolloutKey]) -> tuple[Mapping[Reason, int], Mapping[Reason, int]]:
        """(masked, dropped) of rollouts whose group has ended; forgets them."""
        masked, dropped = Counter[Reason](), Counter[Reason]()
        for key in keys:
            masked.update(self._masked.pop(key, Counter()))
            dropped.update(self._dropped.pop(key, Counter()))
        return masked, dropped


class _Slots:
    """The slots that admission reserved for a group: leaving one frees it for the next group."""

    def __init__(self, queue: GroupQueue, key: GroupKey) -> None:
        self._queue, self._key = queue, key

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None:
        self._queue.end_rollout(self._key)


class Recorded:
    """Runs rollouts and records each as it ends. Those that had ended before a crash come back from the store, once."""

    def __init__(self, runner: RolloutRunner, records: Records, fates: Fates) -> None:
        self._runner, self._records, self._fates = runner, records, fates
        self._finished: dict[RolloutKey, Trajectory] = {}

    def restore(self, trajectories: Iterable[Trajectory]) -> None:
        self._finished.update({t.key: t for t in trajectories})

    async def run(self, key: RolloutKey, task: Task) -> Trajectory:
        if (finished := self._finished.pop(key, None)) is not None:
            return finished
        trajectory = await self._runner.run(key, task)
        if trajectory.reward is not None:
            self._records.rollout_finished(trajectory, *self._fates.of(key))
        return trajectory


class Rollouts:
    """Starts a group whenever admission allows, and sees each to its end."""

    def __init__(
        self,
        queue: GroupQueue,
        stream: SeededStream,
        *,
        runner: Recorded,
        ages: GroupAges,
        fates: Fates,
        records: Records,
        record: Record,
        group_size: int,
        min_group_size: int,
        retries: int,
    ) -> None:
        self._queue, self._stream, self._runner = queue, stream, runner
        self._ages, self._fates, self._records, self._record = ages, fates, records, record
        self._group_size, self._min_group_size, self._retries = group_size, min_group_size, retries
        self._failed_in_a_row = 0

    async def run(self) -> None:
        """Runs until cancelled, which cancels the groups, or until too many groups in a row have failed."""
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._records.room()
                key = await self._queue.admit(self._draw)
                task = self._stream.task_at(key.epoch, key.index)
                self._records.admitted(key, task)
                groups.create_task(self._group(key, task), name=f"group {key}")
                await asyncio.sleep(0)  # the agents of a group start together: milliseconds in which nobody else is heard

    def _draw(self) -> GroupKey:
        return self._stream.next()[0]

    async def _group(self, key: GroupKey, task: Task) -> None:
        slots = _Slots(self._queue, key)
        runner = GroupRunner(rollouts=self._runner, slots=slots, fates=self._fates, group_size=self._group_size, retries=self._retries)
        trajectories = await runner.run(key, task)
        for lost in (t for t in trajectories if t.reward is None):
            self._records.rollout_finished(lost, *self._fates.of(lost.key))  # only now: it is not tried again
            self._fates.rows_discarded(lost.key, lost.rows, reason=Reason.NO_REWARD)
        masked, dropped = self._fates.settle(t.key for t in trajectories)
        result = collect(key, task, trajectories=trajectories, min_size=self._min_group_size)
        if isinstance(result, Group):
            await self._records.finished(result)
            self._queue.put(result, masked=masked, dropped=dropped)
            rewards = [t.reward for t in result.trajectories if t.reward is not None]
            self._record(GroupFinished(key, len(rewards), sum(rewards) / len(rewards)))
        else:
            scored = sum(t.num_trainable for t in trajectories if t.reward is not None)  # the others' tokens are in `dropped`
            self._queue.drop(key, result, num_tokens=scored + sum(masked.values()) + sum(dropped.values()))
        self._ages.forget(key)
        self._budget(trajectories)

    def _budget(self, trajectories: list[Trajectory]) -> None:
        """An environment that always fails must not look like a run that is merely slow."""
        if any(t.reward is not None for t in trajectories):
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_FAILED_GROUPS:
            first = next((t for t in trajectories if t.error), trajectories[0])
            raise RunFailed(
                f"{self._failed_in_a_row} groups in a row got no reward; task {first.task_id} of {first.source} failed with "
                f"{first.error or 'a reward of None'}; mend the environment or the engines, whose logs are in the run's folder."
            )
