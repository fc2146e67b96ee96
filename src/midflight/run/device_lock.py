"""The lock on the devices that engines and the trainer have in turns (`engine.share = "time"`).

All engines may hold it together, or the trainer alone. It is a lock of the system on a file of the
run's folder, so that it is free as soon as its holder is dead, and its memory with it.
"""

import asyncio
import fcntl
import os
from pathlib import Path

from midflight.config.sections import Config
from midflight.ports import Sleeper
from midflight.types import MemoryPart

DEVICE_LOCK = "device.lock"


class DeviceLock:
    """The lock as one process has it. Both verbs are idempotent."""

    def __init__(self, path: Path, *, alone: bool) -> None:
        """`alone`: nobody else may hold it at the same time."""
        self._kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self._turn = asyncio.Lock()
        self._is_held = False

    async def take(self) -> None:
        """Waits until the other side has left or is dead. A thread waits, which nothing ends but
        that, or the end of this process.
        """
        async with self._turn:
            if not self._is_held:
                await asyncio.to_thread(fcntl.flock, self._file, self._kind)
                self._is_held = True

    def leave(self) -> None:
        if self._is_held:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._is_held = False


def device_lock(config: Config, *, alone: bool) -> DeviceLock | None:
    """The lock of a run, for the trainer (`alone`) or an engine. None if they do not take turns."""
    if not config.engine.takes_turns:
        return None
    return DeviceLock(Path(config.run.folder) / DEVICE_LOCK, alone=alone)


class LockedSleeper:
    """An engine that holds the lock while any of its memory is on the device."""

    def __init__(self, engine: Sleeper, lock: DeviceLock) -> None:
        self._engine = engine
        self._lock = lock

    async def sleep(self) -> None:
        await self._engine.sleep()
        self._lock.leave()

    async def wake(self, part: MemoryPart) -> None:
        """Waits until the trainer has left the device."""
        await self._lock.take()
        await self._engine.wake(part)
