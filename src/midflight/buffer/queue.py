"""The waiting around `Books`, on one event loop. No decision is taken here.

| wait    | waits for                                     | woken by                 | ended by              |
|---------|-----------------------------------------------|--------------------------|-----------------------|
| `admit` | credit, room in the buffer, slots for a group | facts that books applied | `close`, cancellation |
| `take`  | B groups that may be left without the others  | facts that books applied | `close`, cancellation |
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from midflight.buffer.books import Books
from midflight.buffer.groups import Wait
from midflight.errors import Stopping
from midflight.types import Batch, GroupKey, Task, Version
from midflight.types.facts import Admitted, Record, Waited

T = TypeVar("T")


@dataclass(slots=True)
class OpenWait:
    """A wait that goes on. Times are the event loop's."""

    wait: Wait
    began: float
    """The time when it began to wait for the same part."""
    counted: float
    """The time up to which it was recorded."""


class GroupQueue:
    """A queue of asyncio tasks that start groups, and one of those that take batches: first come,
    first served. It records every decision.

    `record` must apply each fact to the books and then call `wake`. `running_oldest` gives the
    oldest version among the tokens of a running group (ended rollouts too), `None` before the
    first; it is asked at every decision, so it needs no notification. `full` returns the wait if no
    group fits beside so many running rollouts, although the books would allow one. A change of its
    answer must be followed by `wake`.
    """

    def __init__(
        self,
        books: Books,
        *,
        record: Record,
        running_oldest: Callable[[GroupKey], Version | None],
        full: Callable[[int], Wait | None] = lambda running: None,
    ) -> None:
        self._books = books
        self._record = record
        self._running_oldest = running_oldest
        self._full = full
        self._admitting = asyncio.Lock()
        self._taking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._stopping = False
        self._waits: dict[str, OpenWait] = {}

    @property
    def waits(self) -> Mapping[str, OpenWait]:
        """The present waits of `admission` and `trainer`: the part that each waits for, and since
        when (I9).
        """
        return self._waits

    def count_waits(self) -> None:
        """Records the waits up to now: a wait counts while it lasts, not only when it ends."""
        now = asyncio.get_running_loop().time()
        for who, open_wait in self._waits.items():
            self._count(who, open_wait, now)

    def wake(self) -> None:
        """Lets every wait look again, after a change that may end one."""
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    def close(self) -> None:
        """Ends every wait, now and later, with `Stopping`. Groups stay where the store has them."""
        self._stopping = True
        self.wake()

    async def admit(
        self, draw: Callable[[], GroupKey | Wait], task_of: Callable[[GroupKey], Task]
    ) -> Admitted:
        """Waits until a group may start, and starts it; see the module's table. `draw` is called
        once there is credit, and again after every change while it says to wait.

        A group in line is started before any is drawn: a further attempt of an earlier one, or one
        that ran before a crash.
        """
        async with self._admitting:
            return await self._until(lambda: self._admit(draw, task_of), who="admission")

    async def take(self, train_version: Version) -> Batch:
        """Waits for the batch of the step that begins at `train_version`; see the module's table.

        It ends: every running group has a deadline, and a dropped one is replaced (proof in
        `staleness`). Asked again before its step is done, it gives the same batch at once. Ended by
        `close` with `Stopping`.
        """
        held = self._books.held(train_version)
        while held is None and self._taking.locked():
            # It does not wait for the lock: the batch may come while another take waits with it.
            await self._changed.wait()
            held = self._books.held(train_version)
        if held is not None:
            return held
        try:
            async with self._taking:
                return await self._until(lambda: self._lease(train_version), who="trainer")
        finally:
            self.wake()

    def _admit(
        self, draw: Callable[[], GroupKey | Wait], task_of: Callable[[GroupKey], Task]
    ) -> Admitted | Wait:
        wait = self._books.admission() or self._full(self._books.num_running_rollouts)
        if wait is not None:
            return wait
        key = self._books.in_line or draw()
        if isinstance(key, Wait):
            return key
        admitted = Admitted(key, task_of(key), self._books.admission_state())
        self._record(admitted)
        return admitted

    def _lease(self, train_version: Version) -> Batch | Wait:
        """The batch held for that version, or a new one."""
        held = self._books.held(train_version)
        if held is not None:
            return held
        for closed in self._books.overdue(train_version):
            self._record(closed)
        found = self._books.choose(train_version, self._running_oldest)
        if isinstance(found, Wait):
            return found
        self._record(found)
        return found.batch

    async def _until(self, attempt: Callable[[], T | Wait], *, who: str) -> T:
        """Tries again after every change. The caller holds its lock, so only one of a kind is
        here.
        """
        try:
            while True:
                result = self._try(attempt)
                if not isinstance(result, Wait):
                    return result
                self._note(who, result)
                await self._changed.wait()
        finally:
            ended = self._waits.pop(who, None)
            if ended is not None:
                self._count(who, ended, asyncio.get_running_loop().time())

    def _try(self, attempt: Callable[[], T | Wait]) -> T | Wait:
        if self._stopping:
            raise Stopping("The run is ending: no group is started or handed out any more.")
        return attempt()

    def _note(self, who: str, wait: Wait) -> None:
        """Keeps the part that `who` waits for. If that changes, one wait has ended and another
        begun.
        """
        now = asyncio.get_running_loop().time()
        before = self._waits.get(who)
        if before is not None and before.wait.for_whom == wait.for_whom:
            before.wait = wait
            return
        if before is not None:
            self._count(who, before, now)
        self._waits[who] = OpenWait(wait, now, now)

    def _count(self, who: str, open_wait: OpenWait, now: float) -> None:
        if now > open_wait.counted:
            self._record(Waited(who, open_wait.wait.for_whom, seconds=now - open_wait.counted))
            open_wait.counted = now
