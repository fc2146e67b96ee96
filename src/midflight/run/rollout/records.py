"""What the rollout process writes to its store, and what must be on disk before the next move (I8)."""

from __future__ import annotations

from collections.abc import Mapping

from midflight.buffer.buffer import Closed
from midflight.trajectories.writer import StoreWriter
from midflight.types import Batch, Group, GroupKey, Reason, RolloutKey, Task, Trajectory, Turn, Version


class Records:
    """Facts become deeds of the store. Only what the writer's docstring demands is waited for."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer

    async def room(self) -> None:
        """Waits while the disk is far behind; ended by the writer."""
        await self._writer.room()

    def admitted(self, key: GroupKey, task: Task) -> None:
        self._writer.put(lambda store: store.admit(key, task))

    def turn_completed(self, key: RolloutKey, number: int, turn: Turn) -> None:
        self._writer.put(lambda store: store.record_turn(key, number, turn))

    def rollout_finished(self, trajectory: Trajectory, masked: Mapping[Reason, int], dropped: Mapping[Reason, int]) -> None:
        masked, dropped = dict(masked), dict(dropped)  # as they are now: the deed is done later
        self._writer.put(lambda store: store.finish_rollout(trajectory, masked=masked, dropped=dropped))

    async def finished(self, group: Group) -> None:
        """Waits until the group is on disk: only then may it be leased. Ended by the writer."""
        self._writer.put(lambda store: store.finish_group(group.key))
        await self._writer.flush()

    def closed(self, closed: Closed) -> None:
        """A group ended untrained; with a successor, its task is in line again."""
        if closed.successor is None:
            self._writer.put(lambda store: store.drop_group(closed.key, closed.reason))
        else:
            self._writer.put(lambda store: store.requeue(closed.key, closed.reason))

    async def leased(self, batch: Batch) -> None:
        """Waits until the lease is on disk: only then may the batch leave. Ended by the writer."""
        self._writer.put(lambda store: store.lease(batch))
        await self._writer.flush()

    def done(self, lease: int) -> None:
        self._writer.put(lambda store: store.done(lease))

    async def checkpointed(self, version: Version) -> None:
        """Waits until the store knows what is final; ended by the writer."""
        self._writer.put(lambda store: store.checkpointed(version))
        await self._writer.flush()
