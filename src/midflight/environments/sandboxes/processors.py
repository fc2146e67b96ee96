"""The processors on which programs of sandboxes on this machine run.

At most as many of these programs run at once in a process as it may use processors. The others have
not started yet, so that their `seconds` do not count. Each of them ends by itself or by its
`seconds`, so that every wait ends.

Programs that have the network are not bounded. They may wait for each other, or be agents that wait
for the model most of the time. What runs on other machines, or in a container, is not bounded
either.
"""

import asyncio
import itertools
import os
import random
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from midflight.environments.processor_waits import current_waits


class WaitingProgram:
    """A program in line for a processor."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Future[None] = self._loop.create_future()
        self.processor: int | None = None

    def give(self, processor: int) -> bool:
        """Gives it a processor, from any thread. Returns False if its event loop is closed."""
        self.processor = processor
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:
            self.processor = None
            return False
        return True

    async def given(self) -> int:
        """Waits for a processor; ended by cancellation."""
        if self.processor is None:
            with current_waits().waiting():
                await self._told
        assert self.processor is not None
        return self.processor

    def _tell(self) -> None:
        if not self._told.done():
            self._told.set_result(None)


class Processors:
    """Gives each program a processor, first come first served. Programs may be started on the event
    loops of several threads.
    """

    def __init__(self) -> None:
        # A coroutine that the garbage collector ends may give back while its thread holds the lock.
        self._lock = threading.RLock()
        self._taken = set[int]()
        self._line = deque[WaitingProgram]()

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[int]:
        """A processor on which no other program runs. Waits until one is free, which the ends of
        programs bring about; ended by cancellation.
        """
        program = WaitingProgram()
        with self._lock:
            self._line.append(program)
            self._hand_out()
        try:
            yield await program.given()
        finally:
            self._give_back(program)

    def _give_back(self, program: WaitingProgram) -> None:
        """Notes that the program has ended, or does not wait any more."""
        with self._lock:
            if program in self._line:
                self._line.remove(program)
            elif program.processor is not None:
                self._taken.remove(program.processor)
            self._hand_out()

    def _hand_out(self) -> None:
        while self._line:
            free = os.sched_getaffinity(0) - self._taken
            if not free:
                return
            # Other processes have programs too, and do not say on which processors.
            processor = random.choice(sorted(free))
            if self._line.popleft().give(processor):
                self._taken.add(processor)


_processors = Processors()
_unbounded = itertools.count()


@asynccontextmanager
async def processor_for(*, network: bool) -> AsyncGenerator[int]:
    """The processor of a program. Waits for it as `Processors.one` does, unless the program has the
    network.
    """
    if network:
        processors = sorted(os.sched_getaffinity(0))
        yield processors[next(_unbounded) % len(processors)]
        return
    async with _processors.one() as processor:
        yield processor
