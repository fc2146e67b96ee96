"""What people are told of a wait that takes long."""

from __future__ import annotations

import asyncio
from contextlib import closing

from midflight.run.reminder import Reminder
from midflight.testing.virtual_time import run_virtual


def test_a_reminder_comes_after_half_a_minute_and_when_the_wait_has_doubled_until_it_ends() -> None:
    said: list[float] = []

    async def main() -> None:
        with closing(Reminder(said.append)):
            await asyncio.sleep(29)
            assert said == []
            await asyncio.sleep(250)
        await asyncio.sleep(10_000)

    run_virtual(main())
    assert said == [30, 60, 120, 240]
