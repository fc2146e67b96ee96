"""Measures of how long something lasts, by the running event loop's clock."""

from __future__ import annotations

import asyncio


class Stopwatch:
    """The total time for which something lasted. `start` and `stop` are idempotent."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = asyncio.get_running_loop().time()

    def stop(self) -> None:
        if self._since is not None:
            self._seconds += asyncio.get_running_loop().time() - self._since
            self._since = None

    @property
    def is_running(self) -> bool:
        return self._since is not None

    def seconds(self) -> float:
        if self._since is None:
            return self._seconds
        return self._seconds + (asyncio.get_running_loop().time() - self._since)


class LoopDelay:
    """The total delay of a loop that should have a turn at every interval. It is late if it was
    blocked or had no processor.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._seconds = 0.0
        self._turned: float | None = None

    def turn(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._turned is not None:
            self._seconds += max(0.0, now - self._turned - self._interval)
        self._turned = now

    def seconds(self) -> float:
        """The delay so far, including that of a turn that is overdue now."""
        if self._turned is None:
            return self._seconds
        late = asyncio.get_running_loop().time() - self._turned - self._interval
        return self._seconds + max(0.0, late)
