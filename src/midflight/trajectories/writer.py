"""The store on an event loop: deeds are put without waiting, and written by a thread, many in one transaction."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from midflight.errors import StoreFailed
from midflight.trajectories.store import Deed, Store

T = TypeVar("T")

MAX_PENDING = 20_000
"""Deeds in memory. At the rate of completed turns this is minutes of a disk that stands still: then the run ends and says so."""
MAX_TOGETHER = 1_000
"""Deeds of one transaction: its commit is paid once, and `flush` waits for at most one that is under way and its own."""


class StoreWriter:
    """Deeds happen in the order they were put.

    What must be durable before the next move: a group before it is put into the buffer, for a group that is leased and then
    forgotten would be generated and trained again; a lease before its batch leaves for the trainer, for the same reason; a
    checkpoint's `checkpointed` before older leases are forgotten. The rest may follow: a turn that is lost is only played again.
    """

    def __init__(self, store: Store, *, max_pending: int = MAX_PENDING) -> None:
        self._store = store
        self._max_pending = max_pending
        self._pending: deque[Deed] = deque()
        self._num_put = 0
        self._num_written = 0
        self._writing = threading.Lock()  # between the thread and `close`
        self._arrived = asyncio.Event()
        self._written = asyncio.Event()
        self._failure: BaseException | None = None

    def put(self, deed: Deed) -> None:
        """To be written soon. Never waits; `room` is for those who can."""
        if self._failure is not None:
            raise StoreFailed(f"The store has failed: {self._failure}") from self._failure
        if len(self._pending) >= self._max_pending:
            raise StoreFailed(f"{len(self._pending)} records wait for the disk, which does not keep up; resume the run on a faster one.")
        self._pending.append(deed)
        self._num_put += 1
        self._arrived.set()

    async def room(self) -> None:
        """Waits until at most half of the bound is pending, so that a slow disk slows admission. Ended by `run`, or its failure."""
        while len(self._pending) > self._max_pending // 2:
            await self._next_write()

    async def flush(self) -> None:
        """Waits until every deed put before is durable. Ended by `run`, or with its failure."""
        mark = self._num_put
        while self._num_written < mark:
            await self._next_write()

    async def call(self, deed: Callable[[Store], T]) -> T:
        """Waits for a deed and everything put before it, and returns its result. A deed that raises ends the run: check first."""
        results: list[T] = []
        self.put(lambda store: results.append(deed(store)))
        await self.flush()
        return results[0]

    async def run(self) -> None:
        """Waits for deeds and writes them; ended by its task group. What is pending then is written by `close`."""
        while True:
            self._arrived.clear()
            while self._pending:
                await self._write_in_thread()
            await self._arrived.wait()

    def close(self) -> None:
        """Writes what is pending, here and now, and closes the file. After `run` has ended."""
        try:
            while self._pending and self._failure is None:
                self._write()
        finally:
            with self._writing:
                self._store.close()

    async def _write_in_thread(self) -> None:
        try:
            await asyncio.to_thread(self._write)
        except Exception as error:
            self._failure = error
            raise
        finally:
            written, self._written = self._written, asyncio.Event()
            written.set()

    def _write(self) -> None:
        with self._writing:
            deeds = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_TOGETHER))]
            self._store.apply(deeds)
            self._num_written += len(deeds)

    async def _next_write(self) -> None:
        if self._failure is None:
            await self._written.wait()
        if self._failure is not None:
            raise StoreFailed(f"The store has failed: {self._failure}") from self._failure
