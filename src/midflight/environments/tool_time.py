"""The time that an agent spends in tools that have limits of their own. It is synchronous."""

import asyncio
from collections.abc import Callable
from typing import Final

UNLIMITED: Final = 1e9
"""The limit of tools that wait in a queue: JSON has no infinity."""


class ToolTime:
    """The time in tools of one rollout. A time under way counts up to its limit. Past that, the
    tool's limit has failed, and the time is the agent's own. Waits for a processor do not count
    here, nor to the limit.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        """`waited` gives the seconds so far in which the rollout's programs waited for a
        processor.
        """
        self._waited = waited
        self._waited_before = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._limit = 0.0

    def begin(self, limit: float) -> None:
        """Begins a time of `limit` seconds at most. It ends a time that is under way."""
        self.end()
        self._since = asyncio.get_running_loop().time()
        self._waited_before = self._waited()
        self._limit = limit

    def end(self) -> None:
        self._seconds = self.seconds()
        self._since = None

    def seconds(self) -> float:
        if self._since is None:
            return self._seconds
        waited = self._waited() - self._waited_before
        took = asyncio.get_running_loop().time() - self._since - waited
        return self._seconds + min(self._limit, took)
