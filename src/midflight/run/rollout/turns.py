"""The turns of engines and trainer on the devices that they share (`engine.share = "time"`).

In the trainer's turn all engines sleep. Their requests were cut, and wait at the gateway for an
engine with the tokens that they have (I5). When the turn ends engines take their memory again, the
weights first: a version that came is committed then, while there are no keys, and beside the new
weights the old ones find room. Then come the keys, and the requests.

| verb | waits for | unblocked by |
|---|---|---|
| `to_trainer` | each engine to sleep | the engine, its death, or `seconds` |
| `to_engines` | the trainer to leave the devices; each engine to wake; the handover between | the trainer's process, its end; the engine, or `seconds` |
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from midflight.errors import EngineError, EngineUnavailable, first_error
from midflight.gateway.fleet.fleet import Fleet
from midflight.ports import Sleeper
from midflight.types import MemoryPart, PauseMode
from midflight.weights.handover import Handover

OWNER = "turns"
"""The name of its holds and pauses."""


class Turns:
    """Whose turn it is. Engines that are not among the `sleepers` have devices of their own: they
    are left alone.
    """

    def __init__(
        self,
        fleet: Fleet,
        sleepers: Mapping[str, Sleeper],
        handover: Handover,
        *,
        seconds: float,
    ) -> None:
        """An engine that takes more than `seconds` to sleep, or to wake a part, is given up."""
        self._fleet = fleet
        self._sleepers = sleepers
        self._handover = handover
        self._seconds = seconds
        self._changing = asyncio.Lock()
        self._rejoining = set[str]()
        self.is_trainers = False
        """True from the first engine that goes to sleep to the last that is awake."""

    async def to_trainer(self) -> None:
        """Returns when no engine that answers has memory on a device. One that is dead has none,
        and one that is frozen keeps the trainer waiting (`DeviceLock`). Idempotent.

        Raises `EngineError` if an engine refuses to sleep.
        """
        async with self._changing:
            self.is_trainers = True
            try:
                async with asyncio.TaskGroup() as group:
                    for name in self._sleepers:
                        group.create_task(self._put_to_sleep(name))
            except ExceptionGroup as refusals:
                raise first_error(refusals) from refusals

    async def to_engines(self, deliver: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wakes the engines. In between `deliver` brings them a version, also if it is their turn
        already. Idempotent. An engine that fails is in quarantine.
        """
        async with self._changing:
            if self.is_trainers:
                await self._wake_all(MemoryPart.WEIGHTS)
            if deliver is not None:
                await deliver()
            if self.is_trainers:
                await self._wake_all(MemoryPart.KEYS)
                for name in self._sleepers:
                    self._fleet.release(name, OWNER)
                self.is_trainers = False

    async def rejoin(self, engine: str) -> bool:
        """Readmits an engine in quarantine, as the handover does. In the trainer's turn it is put
        to sleep, for it has just started and has its memory.
        """
        if engine not in self._sleepers:
            return await self._handover.rejoin(engine)
        if engine in self._rejoining:
            return False
        self._rejoining.add(engine)
        try:
            if self.is_trainers:
                if not self._changing.locked():
                    await self._put_to_sleep(engine)
                return False
            async with self._given_up(engine):
                await self._sleepers[engine].wake(MemoryPart.WEIGHTS)
                await self._sleepers[engine].wake(MemoryPart.KEYS)
            return await self._handover.rejoin(engine)
        finally:
            self._rejoining.discard(engine)

    # --- One engine -------------------------------------------------------------------------------

    async def _put_to_sleep(self, name: str) -> None:
        self._fleet.hold(name, OWNER)
        for engine in self._fleet.engines_of(OWNER):
            if engine.name == name:
                async with self._given_up(name, refusals=False):
                    await engine.pause(PauseMode.ABORT)
                    await self._sleepers[name].sleep()

    async def _wake_all(self, part: MemoryPart) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self._sleepers:
                group.create_task(self._wake(name, part))

    async def _wake(self, name: str, part: MemoryPart) -> None:
        for engine in self._fleet.engines_of(OWNER):
            if engine.name == name:
                async with self._given_up(name):
                    await self._sleepers[name].wake(part)
                    if part is MemoryPart.KEYS:
                        await engine.resume()

    @asynccontextmanager
    async def _given_up(self, engine: str, *, refusals: bool = True) -> AsyncGenerator[None]:
        """An engine that is lost or late in the block is in quarantine after it. So is one that
        refuses, if `refusals`; otherwise its error is raised.
        """
        try:
            async with asyncio.timeout(self._seconds):
                yield
        except (EngineUnavailable, OSError) as error:  # a timeout is an OSError
            self._fleet.quarantine(engine, error)
        except EngineError as error:
            if not refusals:
                raise
            self._fleet.quarantine(engine, error)
