"""Measures of how long something lasts, by the running event loop's clock."""

from __future__ import annotations

import asyncio


class Stopwatch:
    """How long something lasted, all its times together. Both verbs are idempotent."""

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
        return self._seconds + (
            0.0 if self._since is None else asyncio.get_running_loop().time() - self._since
        )


class LoopDelay:
    """How late a loop came to the turns that it should have had at an interval, all together: it
    was blocked, or had no processor.
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
        """A turn that is due now counts already."""
        late = (
            0.0
            if self._turned is None
            else asyncio.get_running_loop().time() - self._turned - self._interval
        )
        return self._seconds + max(0.0, late)
