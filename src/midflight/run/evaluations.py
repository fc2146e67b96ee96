"""Held-out scores along a run: before it, after it, and of every so many versions between.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Evaluations.run` | evaluations due | the next that is due; then its rollouts | a version published; the rollouts' deadlines |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from midflight.environments.evaluation import Evaluator
from midflight.observe.status import Phase
from midflight.types import Task, Version


class Phases(Protocol):
    """Whoever shows the run hears what it is doing."""

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None: ...


class Evaluations:
    """One at a time, of the version served at its beginning. It holds `pinned` until it is over: no handover happens meanwhile."""

    def __init__(self, evaluator: Evaluator, tasks: Sequence[Task], *, every: int, phases: Phases, served: Callable[[], Version]) -> None:
        """`every`: versions between two that fall due, 0 for none."""
        self._evaluator, self._tasks, self._every = evaluator, tasks, every
        self._phases, self._served = phases, served
        self._due = asyncio.Event()
        self.pinned = asyncio.Lock()

    def published(self, version: Version) -> None:
        """An evaluation that is due already is not due twice."""
        if self._every and version % self._every == 0:
            self._due.set()

    async def run(self) -> None:
        """Waits for the next that falls due; ended by its task group."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.evaluate(Phase.TRAINING)

    async def evaluate(self, phase: Phase) -> None:
        """Waits for a handover under way, then for its rollouts, each of which has a deadline."""
        async with self.pinned:
            self._phases.begin_phase(phase, num_tasks=len(self._tasks))
            await self._evaluator.run(self._tasks, version=self._served())
