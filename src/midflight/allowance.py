"""The seconds that a piece of work may take. The clock stops while others hold the work up, and a
wait under it can be cut.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

_LOOK_SHARE = 0.01
"""The share of the seconds between two readings of `excused` while it grows. The block may end late
by this share at most.
"""


_ROUNDING = 1e-9
"""The share of the seconds that counts as a rounding error and not as time."""
LOOKS: Final = 10
"""The number of times that `moved` is called within the seconds. So work may stall for a tenth
longer.
"""


class Expired(Exception):
    """The seconds are spent. It is no `TimeoutError`, because that may come from the work
    itself.
    """


class Cut(Exception):
    """The block was ended on purpose. The caller of `cut` knows why."""


class Allowance:
    """`async with allowance:` ends its block with `Expired` when the seconds are spent, and with
    `Cut` after `cut`.

    There may be any number of blocks, one after another. The clock runs from the creation on,
    between blocks too. It stops from `stop` to `start`, which are both idempotent.
    """

    def __init__(
        self,
        seconds: float,
        *,
        excused: Callable[[], float] | None = None,
        left: Callable[[], float] | None = None,
        moved: Callable[[], bool] | None = None,
    ) -> None:
        """All three functions are called whenever the time seems to be up. `excused`: seconds since
        some fixed instant that do not count. `left`: the seconds left, instead of this clock's own
        count. It is infinite while no time is spent; `look` must be called when time is spent
        again.

        `moved`: whether the work has made progress since the last call. Then the seconds begin
        anew. It is called `LOOKS` times within the seconds.
        """
        self.seconds = seconds
        self._counted = left
        self._moved = moved
        self.expired = False
        """True if the end of the seconds has ended a block. Also true if the block caught its
        cancellation and went on.
        """
        self._loop = asyncio.get_running_loop()
        self._made = self._loop.time()
        self._begun = self._made
        """The time when the seconds began. They may begin anew."""
        self._excused = excused
        self._excused_before = 0.0 if excused is None else excused()
        self._stood = 0.0
        """Seconds for which the clock was stopped, without the present stop."""
        self._stopped: float | None = None
        """The time when the present stop began; `None` while the clock runs."""
        self._is_cut = False
        self._scope: asyncio.Timeout | None = None
        """The scope of the block under way."""
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
        """Seconds since it was created, including those in which the clock was stopped."""
        return self._loop.time() - self._made

    def look(self) -> None:
        """Must be called when `left` has become finite, or larger. If a reading is already
        scheduled, it is early enough for both.
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
        """A context manager that stops the clock."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def cut(self) -> None:
        """Ends the block under way with `Cut`, or the next one before it begins. Must not be called
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
        """Sets the timer. It runs while a block is under way and the clock is not stopped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._scope is None or self._stopped is not None:
            return
        left = self.left
        if left < math.inf:
            self._timer = self._loop.call_later(min(max(0.0, left), self._longest), self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._moved is not None and self._moved():
            self._begin_anew()
        left = self.left if self._is_asked else 0.0
        if left == math.inf:
            return
        if left > _ROUNDING * self.seconds:
            wait = max(left, _LOOK_SHARE * self.seconds)
            self._timer = self._loop.call_later(min(wait, self._longest), self._ring)
        else:
            self.expired = True
            self._end_block()

    def _begin_anew(self) -> None:
        self._begun = self._loop.time()
        self._stood = 0.0
        self._excused_before = 0.0 if self._excused is None else self._excused()

    @property
    def _is_asked(self) -> bool:
        """True if one of the functions may say that time is left when the clock says that it
        is up.
        """
        return not (self._excused is None and self._counted is None and self._moved is None)

    @property
    def _longest(self) -> float:
        """The longest wait between two readings."""
        return math.inf if self._moved is None else self.seconds / LOOKS

    def _end_block(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._loop.time())
