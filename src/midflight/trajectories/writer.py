"""The store on an event loop. Facts are put without waiting, and a thread writes many of them in
one transaction.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from midflight.errors import StoreFailed
from midflight.trajectories.store import Store
from midflight.types.facts import Fact

T = TypeVar("T")

MAX_PENDING = 20_000
"""Facts in memory. At the rate of completed turns, as many gather in minutes if the disk stops
working: then the run ends with that message.
"""
GATHER_SECONDS = 0.2
"""The time that facts may gather while no caller waits for them. The turns of a rollout that ends
meanwhile need not be written at all.
"""
MAX_TOGETHER = 1_000
"""Facts of one transaction. Its commit is paid once, and `flush` waits for at most the transaction
that is under way and its own.
"""


class StoreWriter:
    """Writes facts in the order in which they were put, so that a file that lacks one lacks all
    after it.

    Two facts must be durable before the next move. A lease, with its groups, must be so before its
    batch leaves for the trainer: a group that is trained and then forgotten would be generated and
    trained again. A checkpoint must be so before older leases are forgotten. The rest may follow: a
    turn that is lost is only played again.
    """

    def __init__(self, store: Store, *, max_pending: int = MAX_PENDING) -> None:
        self._store = store
        self._max_pending = max_pending
        self._pending: deque[Fact | Callable[[Store], object]] = deque()
        self._num_put = 0
        self._num_written = 0
        self._writing = threading.Lock()  # between the thread and `close`
        self._arrived = asyncio.Event()
        self._awaited = asyncio.Event()
        self._written = asyncio.Event()
        self._failure: BaseException | None = None

    def put(self, fact: Fact) -> None:
        """Puts a fact that is written soon. It never waits; callers that can wait use `room`."""
        self._append(fact)

    def _append(self, deed: Fact | Callable[[Store], object]) -> None:
        if self._failure is not None:
            raise StoreFailed(f"The store has failed: {self._failure}") from self._failure
        if len(self._pending) >= self._max_pending:
            raise StoreFailed(
                f"{len(self._pending)} records wait for the disk, which does not keep up; resume "
                "the run on a faster one."
            )
        self._pending.append(deed)
        self._num_put += 1
        self._arrived.set()
        if len(self._pending) >= MAX_TOGETHER:
            self._awaited.set()

    async def room(self) -> None:
        """Waits until at most half of the bound is pending, so that a slow disk slows admission.
        `run` ends the wait, or its failure does.
        """
        while len(self._pending) > self._max_pending // 2:
            await self._next_write()

    async def flush(self) -> None:
        """Waits until every fact put before is durable. `run` ends the wait, or its failure
        does.
        """
        mark = self._num_put
        while self._num_written < mark:
            await self._next_write()

    async def read(self, reading: Callable[[Store], T]) -> T:
        """Waits for everything put before, and returns the result of reading the store then. A
        reading that raises ends the run.
        """
        results: list[T] = []
        self._append(lambda store: results.append(reading(store)))
        await self.flush()
        return results[0]

    async def run(self) -> None:
        """Waits for facts and writes them, until its task group ends it. `close` writes the facts
        that are pending then.
        """
        while True:
            self._arrived.clear()
            while self._pending:
                await self._gathered()
                await self._write_in_thread()
            await self._arrived.wait()

    def close(self) -> None:
        """Writes the pending facts at once and closes the file. It is called after `run` has
        ended.
        """
        try:
            while self._pending and self._failure is None:
                self._write()
        finally:
            with self._writing:
                self._store.close()

    async def _gathered(self) -> None:
        """Waits until there is a transaction's worth of facts, a caller waits for them, or they are
        old enough.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(GATHER_SECONDS):
                await self._awaited.wait()
        self._awaited.clear()

    async def _write_in_thread(self) -> None:
        try:
            await asyncio.to_thread(self._write)
        except Exception as error:
            self._failure = error
            raise
        finally:
            written = self._written
            self._written = asyncio.Event()
            written.set()

    def _write(self) -> None:
        with self._writing:
            number = min(len(self._pending), MAX_TOGETHER)
            deeds = [self._pending.popleft() for _ in range(number)]
            self._store.write(deeds)
            self._num_written += len(deeds)

    async def _next_write(self) -> None:
        if self._failure is None:
            self._awaited.set()
            await self._written.wait()
        if self._failure is not None:
            raise StoreFailed(f"The store has failed: {self._failure}") from self._failure
