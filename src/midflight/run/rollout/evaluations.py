"""Held-out scores along a run: before it, after it, and at an interval of versions between. Each is
of exactly one version.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Evaluations.run` | evaluations due | the next that is due; its rollouts; then the handover that its engine missed | a version published; the rollouts' deadlines, or the end of the reservation; the engine, or the handover's deadlines |
| `Evaluations.making_way` | nothing | an evaluation that no version may overtake | its end; where training goes on, another engine, or `pin_seconds` |
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from midflight.environments.evaluation import Evaluator
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.fleet.reservation import Reservation
from midflight.observe.status import Phase
from midflight.ports import RequestWatch, SessionHandle, Sessions
from midflight.types import RolloutKey, SamplingParams, SessionRecord, Task, Version
from midflight.weights.handover import Handover


class Phases(Protocol):
    """Receives the run's present activity, to show it."""

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None: ...


class ReservedSessions:
    """Implements `ports.Sessions` around the gateway's. Sessions that are opened during a
    reservation belong to it.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.reservation: Reservation | None = None

    def open(self, key: RolloutKey, *, sampling: SamplingParams, tracked: bool) -> SessionHandle:
        handle = self._sessions.open(key, sampling=sampling, tracked=tracked)
        if self.reservation is not None:
            self.reservation.sessions.add(handle.session_id)
        return handle

    def close(self, session_id: str) -> SessionRecord:
        record = self._sessions.close(session_id)
        if self.reservation is not None:
            self.reservation.sessions.discard(session_id)
        return record

    def oldest_version(self, session_id: str) -> Version | None:
        return self._sessions.oldest_version(session_id)

    def request_watch(self, session_id: str) -> RequestWatch:
        return self._sessions.request_watch(session_id)


class Evaluations:
    """Makes one evaluation at a time. Before and after training all engines work at it, and no
    version comes. Between, one engine is reserved for it.
    """

    def __init__(
        self,
        evaluator_of: Callable[[Sessions], Evaluator],
        tasks: Sequence[Task],
        *,
        every: int,
        pin_seconds: float,
        phases: Phases,
        fleet: Fleet,
        handover: Handover,
        sessions: Sessions,
    ) -> None:
        """`every` is the number of versions between two evaluations, 0 for none. If the version
        that falls due is not published, the next published one takes its place.
        """
        self._sessions = ReservedSessions(sessions)
        self._evaluator = evaluator_of(self._sessions)
        self._tasks = tasks
        self._every = every
        self._pin_seconds = pin_seconds
        self._phases = phases
        self._fleet = fleet
        self._handover = handover
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._all_engines = asyncio.Lock()
        self._before: Version | None = None
        self._published: Version | None = None

    # --- Before and after training ----------------------------------------------------------------

    async def evaluate(self) -> None:
        """Evaluates the version that all engines serve. Waits for a handover under way, then for
        its rollouts, each of which has a deadline. Does nothing if there is no held-out task.
        """
        if not self._tasks:
            return
        async with self._all_engines:
            self._phases.begin_phase(
                Phase.EVALUATION, num_tasks=self._evaluator.num_rollouts(self._tasks)
            )
            current = self._handover.current  # the version that an absent engine comes back with
            self._before = self._fleet.served_version() if current is None else current.version
            await self._evaluator.run(self._tasks, version=self._before)

    # --- Between ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def making_way(self) -> AsyncGenerator[None]:
        """Surrounds a handover of a version. Waits for an evaluation by all engines. If an
        evaluation has the only engine that could take the version, waits for that too, for
        `pin_seconds` at most. Rollouts that are unfinished by then have failed.
        """
        async with self._all_engines:
            reservation = self._sessions.reservation
            if reservation is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pin_seconds):
                        await reservation.passable.wait()
                if not reservation.passable.is_set():
                    self._fleet.unreserve(reservation)
            yield

    def published(self, version: Version) -> None:
        """Must be called as soon as the version's handover has ended, before the next can begin. An
        evaluation that falls due during another is left out.
        """
        before = version - 1 if self._published is None else self._published
        self._published = version
        if not self._falls_due(version, before):
            return
        if version != self._before and self._sessions.reservation is None:
            self._sessions.reservation = self._fleet.reserve(version)
            self._idle.clear()
            self._due.set()

    def _falls_due(self, version: Version, before: Version) -> bool:
        """True if a multiple of `every` lies above `before` and at most at `version`."""
        if not self._tasks or not self._every:
            return False
        return version // self._every > before // self._every

    async def run(self) -> None:
        """Waits for the next that falls due; ended by its task group."""
        while True:
            await self._due.wait()
            self._due.clear()
            reservation = self._sessions.reservation
            if reservation is not None:
                await self._by_one_engine(reservation)

    async def settled(self) -> None:
        """Waits for the evaluation under way, unless the one after training will be of the same
        version.
        """
        reservation = self._sessions.reservation
        if reservation is not None and reservation.version < self._fleet.current_version():
            await self._idle.wait()

    async def _by_one_engine(self, reservation: Reservation) -> None:
        """Waits for its rollouts, and for its engine to take the version that has come
        meanwhile.
        """
        self._phases.begin_phase(
            Phase.TRAINING, num_tasks=self._evaluator.num_rollouts(self._tasks)
        )
        try:
            await self._evaluator.run(
                self._tasks, version=reservation.version, over=reservation.over
            )
            engine = reservation.engine
            self._fleet.unreserve(reservation)
            if engine is not None:
                await self._handover.catch_up(engine)
        finally:
            self._fleet.unreserve(reservation)
            self._sessions.reservation = None
            self._idle.set()
