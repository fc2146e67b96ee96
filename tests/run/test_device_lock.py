"""The lock of devices that are shared in turns, over several processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from midflight.config.load import load_config
from midflight.run.device_lock import DEVICE_LOCK, DeviceLock, LockedSleeper, device_lock
from midflight.types import MemoryPart

HOLDER = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


async def waits(lock: DeviceLock) -> bool:
    taking = asyncio.ensure_future(lock.take())
    await asyncio.wait({taking}, timeout=0.1)
    return not taking.done()


def test_engines_hold_it_together_and_the_trainer_alone(tmp_path: Path) -> None:
    async def main() -> None:
        one, other = (DeviceLock(tmp_path / DEVICE_LOCK, alone=False) for _ in range(2))
        trainer = DeviceLock(tmp_path / DEVICE_LOCK, alone=True)
        await one.take()
        await one.take()
        await other.take()
        taking = asyncio.ensure_future(trainer.take())
        one.leave()
        one.leave()
        await asyncio.wait({taking}, timeout=0.1)
        assert not taking.done()
        other.leave()
        async with asyncio.timeout(5):
            await taking
        assert await waits(one)
        trainer.leave()

    asyncio.run(main())


def test_a_dead_trainer_holds_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / DEVICE_LOCK)], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        engine = DeviceLock(tmp_path / DEVICE_LOCK, alone=False)
        taking = asyncio.ensure_future(engine.take())
        await asyncio.wait({taking}, timeout=0.1)
        assert not taking.done()
        holder.kill()
        holder.wait()
        async with asyncio.timeout(5):
            await taking

    asyncio.run(main())


class Sleeping:
    def __init__(self) -> None:
        self.done: list[str] = []

    async def sleep(self) -> None:
        self.done.append("sleep")

    async def wake(self, part: MemoryPart) -> None:
        self.done.append(part)


def test_an_engine_that_wakes_waits_until_the_trainer_has_left(tmp_path: Path) -> None:
    async def main() -> None:
        engine, trainer = DeviceLock(tmp_path / DEVICE_LOCK, alone=False), DeviceLock(tmp_path / DEVICE_LOCK, alone=True)
        await engine.take()
        sleeping = Sleeping()
        locked = LockedSleeper(sleeping, engine)
        await locked.sleep()
        await trainer.take()
        waking = asyncio.ensure_future(locked.wake(MemoryPart.WEIGHTS))
        await asyncio.wait({waking}, timeout=0.1)
        assert sleeping.done == ["sleep"]
        trainer.leave()
        async with asyncio.timeout(5):
            await waking
        assert sleeping.done == ["sleep", "weights"]

    asyncio.run(main())


def test_there_is_none_where_devices_are_not_shared_in_turns(tmp_path: Path) -> None:
    assert device_lock(load_config(None, [f"run.folder={tmp_path}"]), alone=True) is None
    assert not list(tmp_path.iterdir())
