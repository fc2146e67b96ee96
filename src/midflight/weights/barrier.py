"""Where engines that change weights together wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal, TypeAlias

Point: TypeAlias = Literal["paused", "committed"]


class Barrier:
    """Nobody passes a point before every engine has reached it or has left. Synchronous but for `reach`.

    While the first commits, none generates any more; when the first resumes, all serve the new version or are in quarantine.
    """

    def __init__(self, engines: Iterable[str]) -> None:
        """Each of them must `leave` in the end, whatever becomes of it: that and its own deadline bound the others' waits."""
        members = frozenset(engines)
        self.alone = len(members) == 1
        """One engine has nobody to wait for."""
        self._missing: dict[Point, set[str]] = {"paused": set(members), "committed": set(members)}
        self._passed: dict[Point, asyncio.Event] = {point: asyncio.Event() for point in self._missing}

    async def reach(self, point: Point, engine: str) -> None:
        """Waits for the engines that are still on their way there; ended by their coming or leaving."""
        self._strike(point, engine)
        await self._passed[point].wait()

    def leave(self, engine: str) -> None:
        """Nobody waits for this one any more. Idempotent."""
        for point in self._missing:
            self._strike(point, engine)

    def _strike(self, point: Point, engine: str) -> None:
        self._missing[point].discard(engine)
        if not self._missing[point]:
            self._passed[point].set()
