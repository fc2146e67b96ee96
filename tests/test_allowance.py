"""Seconds that stand still, and can be cut; and times that others tell."""

from __future__ import annotations

import asyncio

import pytest

from midflight.allowance import Allowance, Cut, Expired
from midflight.sender_clock import DRIFT, SenderClock
from midflight.testing.virtual_time import run_virtual


def test_it_stands_while_stopped_and_ends_its_block_when_it_is_spent() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        allowance = Allowance(10)
        loop.call_later(4, allowance.stop)
        loop.call_later(5, allowance.stop)
        loop.call_later(1000, allowance.start)
        with pytest.raises(Expired):
            async with allowance:
                await loop.create_future()
        assert allowance.left == pytest.approx(0) and allowance.expired
        assert allowance.age == loop.time()
        return loop.time()

    assert run_virtual(main()) == pytest.approx(1006)


def test_its_clock_runs_between_blocks_too() -> None:
    async def main() -> None:
        allowance = Allowance(10)
        async with allowance:
            await asyncio.sleep(3)
        await asyncio.sleep(4)
        assert allowance.left == pytest.approx(3)
        with pytest.raises(Expired):
            async with allowance:
                await asyncio.sleep(4)
        with pytest.raises(Expired):
            async with allowance:
                await asyncio.sleep(0)
                await asyncio.sleep(1)
        assert asyncio.get_running_loop().time() == pytest.approx(10)

    run_virtual(main())


def test_a_block_may_stand_still_for_a_while() -> None:
    async def main() -> None:
        async with Allowance(10) as allowance:
            with allowance.standing():
                await asyncio.sleep(100)
            await asyncio.sleep(9)
            assert allowance.left == pytest.approx(1)
        assert not allowance.expired

    run_virtual(main())


def test_a_cut_ends_the_block_under_way_or_the_next_one_and_then_no_other() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        allowance = Allowance(10)
        loop.call_later(3, allowance.cut)
        with pytest.raises(Cut):
            async with allowance:
                await loop.create_future()
        assert loop.time() == 3
        allowance.cut()
        begun: list[bool] = []
        with pytest.raises(Cut):
            async with allowance:
                begun.append(True)
        assert begun == [] and not allowance.expired
        async with allowance:
            assert await asyncio.sleep(1, "done") == "done"

    run_virtual(main())


def test_a_timeout_of_the_block_itself_is_passed_on() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="of the engine"):
            async with Allowance(10):
                raise TimeoutError("of the engine")

    run_virtual(main())


def test_a_cancellation_from_outside_is_passed_on() -> None:
    async def work() -> None:
        async with Allowance(10):
            await asyncio.sleep(100)

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


def test_a_block_that_catches_its_cancellation_is_told_from_one_that_was_in_time() -> None:
    async def main() -> None:
        async with Allowance(10) as allowance:
            try:
                await asyncio.sleep(11)
            except asyncio.CancelledError:
                assert allowance.expired
        assert allowance.expired

    run_virtual(main())


def test_excused_seconds_do_not_count_and_are_looked_at_in_time() -> None:
    """Those from 50 s to 250 s are excused: the 60 s are spent after 260."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(Expired):
            async with Allowance(60, excused=lambda: 7.0 + min(max(0.0, loop.time() - 50), 200)):
                await loop.create_future()
        return loop.time()

    assert 260 <= run_virtual(main()) <= 260 + 0.6


def test_times_of_a_machine_that_began_days_later_are_told_by_our_clock_as_well_as_the_quickest_message_says() -> None:
    """Its clock is 1000 s behind ours. Messages take 3 s, 0.5 s and 7 s: the second is the best, and the third moves nothing."""
    clock = SenderClock()
    assert clock.shift(50.0, now=1053.0) == 1003.0
    assert clock.shift(60.0, now=1060.5) == 1000.5
    assert clock.shift(61.0, now=1068.0) == pytest.approx(1000.5 + 7.5 * DRIFT)


def test_a_clock_that_runs_slower_than_ours_is_followed() -> None:
    """It loses 50 microseconds a second, and every message takes 1 s: after a day the shift has grown by the 4.32 s that it lost."""
    clock = SenderClock()
    shifts = [clock.shift(now * (1 - 50e-6) - 1.0, now=now) for now in map(float, range(0, 86_401, 10))]
    assert shifts[-1] == pytest.approx(1.0 + 4.32, abs=0.01)
