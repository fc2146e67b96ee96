"""The seconds that a piece of work may take. They stand still while others hold the work up, and a
wait under them can be cut.

And times that another process tells, as times of this one's clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

_LOOK_SHARE = 0.01
"""Part of the seconds between two looks at `excused` while it grows. The block may end late by this
part at most.
"""


_ROUNDING = 1e-9
"""Part of the seconds that is no time any more, but what adding up leaves."""
LOOKS: Final = 10
"""Whether work moves is looked at so many times in its seconds: it may stand for a tenth longer."""


class Expired(Exception):
    """The seconds are spent. No `TimeoutError`, which may come from the work itself."""


class Cut(Exception):
    """Somebody ended the block on purpose, and knows why."""


class Allowance:
    """`async with allowance:` ends its block with `Expired` when the seconds are spent, and with
    `Cut` after `cut`.

    One block at a time, any number one after another. The loop's clock runs from the making on,
    between blocks too; it stands still from `stop` to `start`, both of which are idempotent.
    """

    def __init__(
        self,
        seconds: float,
        *,
        excused: Callable[[], float] | None = None,
        left: Callable[[], float] | None = None,
        moved: Callable[[], bool] | None = None,
    ) -> None:
        """All three are read whenever the time seems to be up. `excused`: seconds since some fixed
        instant that do not count. `left`: what is left, in place of this clock's own count;
        infinite while nothing is spent, and `look` says that it is spent again.

        `moved`: whether the work has moved since that was asked last. Then the seconds begin anew;
        it is asked `LOOKS` times in them.
        """
        self.seconds = seconds
        self._counted = left
        self._moved = moved
        self.expired = False
        """Whether the end of the seconds has ended a block. True also where the block caught its
        cancellation and went on.
        """
        self._loop = asyncio.get_running_loop()
        self._made = self._loop.time()
        self._begun = self._made
        """When the seconds began, which may begin anew."""
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
        if self._counted is not None:
            return self._counted()
        excused = 0.0 if self._excused is None else self._excused() - self._excused_before
        now = self._loop.time() if self._stopped is None else self._stopped
        return self.seconds - (now - self._begun - self._stood) + excused

    @property
    def age(self) -> float:
        """Seconds since it was made, also those in which it stood still."""
        return self._loop.time() - self._made

    def look(self) -> None:
        """To be called when `left` has become finite, or larger. A look that is planned already is
        early enough for both.
        """
        if self._timer is None:
            self._set_timer()

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
        """Ends the block under way with `Cut`, or the next one before it begins. Not to be called
        from inside the block.
        """
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Never waits."""
        scope = self._scope
        self._scope = None
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
        if self._scope is None or self._stopped is not None:
            return
        if (left := self.left) < math.inf:
            self._timer = self._loop.call_later(min(max(0.0, left), self._longest), self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._moved is not None and self._moved():
            self._begin_anew()
        left = self.left if self._is_asked else 0.0
        if left == math.inf:
            return
        if left > _ROUNDING * self.seconds:
            self._timer = self._loop.call_later(
                min(max(left, _LOOK_SHARE * self.seconds), self._longest), self._ring
            )
        else:
            self.expired = True
            self._end_block()

    def _begin_anew(self) -> None:
        self._begun = self._loop.time()
        self._stood = 0.0
        self._excused_before = 0.0 if self._excused is None else self._excused()

    @property
    def _is_asked(self) -> bool:
        """Whether somebody else may say that time is left where the clock says that it is up."""
        return not (self._excused is None and self._counted is None and self._moved is None)

    @property
    def _longest(self) -> float:
        """Between two looks."""
        return math.inf if self._moved is None else self.seconds / LOOKS

    def _end_block(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._loop.time())
