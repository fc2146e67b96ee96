"""The seconds that a piece of work may take. They stand still while others hold the work up, and a wait under them can be cut.

And times that another process tells, as times of this one's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

_LOOK_SHARE = 0.01
"""Part of the seconds between two looks at `excused` while it grows. The block may end late by this part at most."""


class Expired(Exception):
    """The seconds are spent. No `TimeoutError`, which may come from the work itself."""


class Cut(Exception):
    """Somebody ended the block on purpose, and knows why."""


class Allowance:
    """`async with allowance:` ends its block with `Expired` when the seconds are spent, and with `Cut` after `cut`.

    One block at a time, any number one after another. The loop's clock runs from the making on, between blocks too; it stands
    still from `stop` to `start`, both of which are idempotent.
    """

    def __init__(self, seconds: float, *, excused: Callable[[], float] | None = None) -> None:
        """`excused`: seconds since some fixed instant that do not count. It is read whenever the time seems to be up."""
        self.seconds = seconds
        self.expired = False
        """Whether the end of the seconds has ended a block. True also where the block caught its cancellation and went on."""
        self._loop = asyncio.get_running_loop()
        self._made = self._loop.time()
        self._excused = excused
        self._excused_before = 0.0 if excused is None else excused()
        self._stood = 0.0
        """Seconds it stood still, without those of the stop in force."""
        self._stopped: float | None = None
        """Since when it stands still."""
        self._is_cut = False
        self._scope: asyncio.Timeout | None = None
        """Of the block under way."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left(self) -> float:
        excused = 0.0 if self._excused is None else self._excused() - self._excused_before
        now = self._loop.time() if self._stopped is None else self._stopped
        return self.seconds - (now - self._made - self._stood) + excused

    @property
    def age(self) -> float:
        """Seconds since it was made, also those in which it stood still."""
        return self._loop.time() - self._made

    def stop(self) -> None:
        if self._stopped is None:
            self._stopped = self._loop.time()
            self._set_timer()

    def start(self) -> None:
        if self._stopped is not None:
            self._stood += self._loop.time() - self._stopped
            self._stopped = None
            self._set_timer()

    @contextmanager
    def standing(self) -> Generator[None]:
        """It stands still within."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def cut(self) -> None:
        """Ends the block under way with `Cut`, or the next one before it begins. Not to be called from inside the block."""
        self._is_cut = True
        self._end_block()

    def raise_if_cut(self) -> None:
        """Raises the `Cut` of a `cut` that came between two blocks."""
        if self._is_cut:
            self._is_cut = False
            raise Cut

    async def __aenter__(self) -> Allowance:
        """Never waits."""
        self.raise_if_cut()
        scope = asyncio.timeout(None)
        await scope.__aenter__()
        self._scope = scope
        self._set_timer()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Never waits."""
        scope, self._scope = self._scope, None
        assert scope is not None
        self._set_timer()
        try:
            await scope.__aexit__(kind, error, trace)
        except TimeoutError:
            self.raise_if_cut()
            raise Expired from None

    def _set_timer(self) -> None:
        """It runs while a block is under way and the clock is not stopped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._scope is not None and self._stopped is None:
            self._timer = self._loop.call_later(max(0.0, self.left), self._ring)

    def _ring(self) -> None:
        left = 0.0 if self._excused is None else self.left
        if left > 0:
            self._timer = self._loop.call_later(max(left, _LOOK_SHARE * self.seconds), self._ring)
        else:
            self.expired = True
            self._end_block()

    def _end_block(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._loop.time())


# --- Times of others -------------------------------------------------------------------------------------------------

DRIFT: Final = 1e-4
"""Seconds a second that two machines' clocks may run apart: several times what quartz does."""


class SenderClock:
    """One sender's CLOCK_MONOTONIC, which began when its machine did: on two machines it differs by days.

        our time = its time + shift,   shift = the least (arrival - sending) of its messages so far, and DRIFT a second more

    So the error is the way of the quickest message: microseconds on one machine, where what is told stays what it was. A message that
    was late, because either side was busy, moves nothing.
    """

    def __init__(self) -> None:
        self._shift: float | None = None
        self._heard = 0.0

    def shift(self, sent: float, *, now: float) -> float:
        """Seconds to be added to the sender's times, after a message that it sent at `sent`, by its clock, and that is here `now`."""
        way = now - sent
        self._shift = way if self._shift is None else min(way, self._shift + DRIFT * (now - self._heard))
        self._heard = now
        return self._shift
