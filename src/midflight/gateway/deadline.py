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
    """Seconds left of a request on the loop's clock. Runs from its making; `stop` and `start` are idempotent (DECISIONS 17)."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._made = self._loop.time()
        self._left = seconds
        self._since: float | None = self._made
        """When the clock was last started, `None` while it stands."""
        self._cut = False
        self._scope: asyncio.Timeout | None = None

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
            self._reschedule()

    def start(self) -> None:
        if self._since is None:
            self._since = self._loop.time()
            self._reschedule()

    def cut(self) -> None:
        """Ends the current wait, or the next one, with `Cut`."""
        self._cut = True
        self._reschedule()

    async def bound(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Waits for what `begin` returns; ended by it, by `cut` (raises `Cut`) or by the end of the time (raises `Expired`).

        One wait at a time. Nothing is begun when the wait has been cut before.
        """
        self._raise_if_cut()
        scope = asyncio.timeout_at(self._when())
        try:
            async with scope:
                self._scope = scope
                return await begin()
        except TimeoutError:
            if not scope.expired():
                raise
            self._raise_if_cut()
            raise Expired from None
        finally:
            self._scope = None

    def _raise_if_cut(self) -> None:
        if self._cut:
            self._cut = False
            raise Cut

    def _when(self) -> float | None:
        if self._cut:
            return self._loop.time()  # at once
        return None if self._since is None else self._since + self._left

    def _reschedule(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._when())
