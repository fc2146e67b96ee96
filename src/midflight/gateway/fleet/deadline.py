"""The time one request may take: it stands still while the request is held, and any wait under it can be cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Expired(Exception):
    """A deadline is spent. Stays inside the gateway, which says what was waited for."""


class Cut(Exception):
    """A wait was ended on purpose (quarantine, cancellation). Stays inside the gateway, which knows why."""


class Deadline:
    """Seconds left of a request on the loop's clock. Runs from its making; `stop` and `start` are idempotent (DECISIONS 17).

    One timer serves all waits of the request, because there is one for every token; `close` ends it with the request.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._made = self._loop.time()
        self._left = seconds
        self._since: float | None = self._made
        """When the clock was last started, `None` while it stands."""
        self._cut = False
        self._scope: asyncio.Timeout | None = None
        """The wait under way."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs from the first wait on, while the clock does."""
        self._waited = False

    @property
    def left(self) -> float:
        return self._left if self._since is None else self._left - (self._loop.time() - self._since)

    @property
    def age(self) -> float:
        """Seconds since the request began, holds included."""
        return self._loop.time() - self._made

    def stop(self) -> None:
        if self._since is not None:
            self._left, self._since = self.left, None
            self._set_timer()

    def start(self) -> None:
        if self._since is None:
            self._since = self._loop.time()
            self._set_timer()

    def cut(self) -> None:
        """Ends the current wait, or the next one, with `Cut`."""
        self._cut = True
        self._end_wait()

    def close(self) -> None:
        """No more waits. Idempotent."""
        self._waited = False
        self._set_timer()

    async def bound(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Waits for what `begin` returns; ended by it, by `cut` (raises `Cut`) or by the end of the time (raises `Expired`).

        One wait at a time. Nothing is begun when the wait has been cut before.
        """
        self.raise_if_cut()
        if not self._waited:
            self._waited = True
            self._set_timer()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scope = scope
                if self._since is not None and self.left <= 0:
                    self._end_wait()
                return await begin()
        except TimeoutError:
            if not scope.expired():
                raise
            self.raise_if_cut()
            raise Expired from None
        finally:
            self._scope = None

    def raise_if_cut(self) -> None:
        """Raises the `Cut` that came while nothing was waited for."""
        if self._cut:
            self._cut = False
            raise Cut

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        runs = self._waited and self._since is not None
        self._timer = self._loop.call_later(max(0.0, self.left), self._end_wait) if runs else None

    def _end_wait(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._loop.time())
