"""The waiting around `GroupBuffer`, on one event loop. No decision is taken here.

| wait    | waits for                                     | woken by                                   | ended by               |
|---------|-----------------------------------------------|--------------------------------------------|------------------------|
| `admit` | credit, room in the buffer, slots for a group | served, end_rollout, put, drop, take, ...  | `close`, cancellation  |
| `take`  | B groups that may be left without the others  | put, drop, take_back, restart              | `close`, cancellation  |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from midflight.buffer.buffer import Closed, GroupBuffer, Wait
from midflight.buffer.ledger import Ledger
from midflight.buffer.limits import Limits
from midflight.buffer.staleness import ages
from midflight.errors import Stopping
from midflight.types import Batch, Group, GroupKey, Reason, Version
from midflight.types.facts import GroupClosed, Leased, Record, Waited

T = TypeVar("T")


class GroupQueue:
    """First come, first served, for those who start groups and for those who take batches.

    `running_oldest` gives the oldest version among the tokens of a running group (ended rollouts too), `None` before the first;
    it is asked at every decision, so it needs no notification. `closed` is told of every group that ends untrained.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        record: Record,
        running_oldest: Callable[[GroupKey], Version | None],
        closed: Callable[[Closed], None] | None = None,
        start_version: Version = 0,
        first_lease: int = 1,
    ) -> None:
        self._record = record
        self._running_oldest = running_oldest
        self._tell = closed
        self._buffer = GroupBuffer(limits, start_version=start_version, first_lease=first_lease, closed=self._on_closed)
        self._admitting = asyncio.Lock()
        self._taking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._stopping = False
        self._newest_lease = first_lease - 1
        self._waits: dict[str, Wait] = {}

    @property
    def ledger(self) -> Ledger:
        """To read only."""
        return self._buffer.ledger

    @property
    def waits(self) -> Mapping[str, Wait]:
        """Who waits here now (`admission`, `trainer`), and for whom (I9)."""
        return self._waits

    # --- Waiting ---

    async def admit(self, draw: Callable[[], GroupKey]) -> GroupKey:
        """Waits until a group may start, and starts it; see the module's table. `draw` is called once there is credit.

        A key that `draw` did not give is a further attempt of an earlier one (`Closed.successor`, or `restore`).
        """
        async with self._admitting:
            return await self._until(lambda: self._buffer.admit(draw), who="admission")

    async def take(self, train_version: Version) -> Batch:
        """Waits for the batch of the step that begins at `train_version`; see the module's table.

        It ends: every running group has a deadline, and a dropped one is replaced (proof in `staleness`). Asked again before
        `done`, it gives the same batch at once. Ended by `close` with `Stopping`.
        """
        while (held := self._buffer.held(train_version)) is None and self._taking.locked():
            await self._changed.wait()  # not for the lock: the batch may be there while another take waits with it
        if held is not None:
            return held
        try:
            async with self._taking:
                batch = await self._until(lambda: self._buffer.lease(train_version, self._running()), who="trainer")
        finally:
            self._wake()
        if batch.lease > self._newest_lease:
            self._newest_lease = batch.lease
            self._observe(batch)
        return batch

    async def _until(self, attempt: Callable[[], T | Wait], *, who: str) -> T:
        """Tries again after every change. The caller holds its lock, so only one of a kind is here."""
        clock = asyncio.get_running_loop()
        since = clock.time()
        try:
            while isinstance(result := self._try(attempt), Wait):
                since = self._note(who, result, since=since, now=clock.time())
                await self._changed.wait()
            return result
        finally:
            if (waited := self._waits.pop(who, None)) is not None:
                self._record(Waited(who, waited.for_whom, seconds=clock.time() - since))

    def _try(self, attempt: Callable[[], T | Wait]) -> T | Wait:
        if self._stopping:
            raise Stopping("The run is ending: no group is started or handed out any more.")
        return attempt()

    def _note(self, who: str, wait: Wait, *, since: float, now: float) -> float:
        """Keeps whom `who` waits for; returns since when. A change of whom is observed as one wait ended, another begun."""
        before = self._waits.get(who)
        self._waits[who] = wait
        if before is None or before.for_whom == wait.for_whom:
            return since
        self._record(Waited(who, before.for_whom, seconds=now - since))
        return now

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- Changes, each of which may end a wait ---

    def served(self, version: Version) -> None:
        """The oldest version that a routable engine serves is now `version`."""
        self._buffer.serve(version)
        self._wake()

    def end_rollout(self, key: GroupKey) -> None:
        """A rollout of a running group has ended: its slot is free."""
        self._buffer.end_rollout(key)
        self._wake()

    def put(self, group: Group, *, masked: Mapping[Reason, int] | None = None, dropped: Mapping[Reason, int] | None = None) -> None:
        """A running group has finished, durably; see `GroupBuffer.put`."""
        self._buffer.put(group, masked=masked, dropped=dropped)
        self._wake()

    def drop(self, key: GroupKey, reason: Reason, *, num_tokens: int = 0) -> None:
        """A running group ended without a usable result."""
        self._buffer.drop(key, reason, num_tokens=num_tokens)
        self._wake()

    def done(self, lease: int) -> None:
        self._buffer.done(lease)
        self._wake()

    def discard(self, lease: int, reason: Reason) -> None:
        """The step was skipped; see `GroupBuffer.discard`."""
        self._buffer.discard(lease, reason)
        self._wake()

    def take_back(self, lease: int) -> None:
        """The trainer died before the step was made."""
        self._buffer.take_back(lease)
        self._wake()

    def checkpointed(self, version: Version) -> None:
        self._buffer.checkpointed(version)

    def restore(self, *, waiting: Iterable[Group] = (), leases: Iterable[Batch] = (), unfinished: Iterable[GroupKey] = ()) -> None:
        """Fills a fresh queue from the store; see `GroupBuffer.restore`."""
        self._buffer.restore(waiting=waiting, leases=leases, unfinished=unfinished)
        self._wake()

    def restart(self, version: Version, *, untrained: Iterable[Group] = ()) -> None:
        """A new trainer begins at `version`; see `GroupBuffer.restart`."""
        self._buffer.restart(version, untrained=untrained)
        self._wake()

    def close(self) -> None:
        """Ends every wait, now and later, with `Stopping`. Groups stay where the store has them."""
        self._stopping = True
        self._wake()

    # --- Facts ---

    def _running(self) -> Mapping[GroupKey, Version | None]:
        return {key: self._running_oldest(key) for key in self._buffer.ledger.running}

    def _on_closed(self, closed: Closed) -> None:
        self._wake()  # also out of an attempt to take that goes on waiting: admission has its credit back
        self._record(GroupClosed(closed.key, closed.reason, closed.num_tokens))
        if self._tell is not None:
            self._tell(closed)

    def _observe(self, batch: Batch) -> None:
        staleness = ages((t for g in batch.groups for t in g.trajectories), batch.train_version)
        self._record(Leased(batch.train_version, len(batch.groups), sum(staleness.values()), staleness))
