"""How long an agent ran tools that have limits of their own. Synchronous."""

import asyncio
from typing import Final

UNLIMITED: Final = 1e9
"""For tools that wait in a queue: JSON has no infinity."""


class ToolTime:
    """Of one rollout. A time under way counts up to its limit: past that the tool's limit has
    failed, and the time is the agent's own.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._limit = 0.0

    def begin(self, limit: float) -> None:
        """For so many seconds at most. One time under way ends with the next."""
        self.end()
        self._since = asyncio.get_running_loop().time()
        self._limit = limit

    def end(self) -> None:
        self._seconds = self.seconds()
        self._since = None

    def seconds(self) -> float:
        if self._since is None:
            return self._seconds
        return self._seconds + min(self._limit, asyncio.get_running_loop().time() - self._since)
