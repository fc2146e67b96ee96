"""The health of engines. An engine that has work but makes no token for too long is put in
quarantine.
"""

import asyncio
from dataclasses import dataclass

from midflight.errors import EngineError, EngineUnavailable
from midflight.gateway.fleet.fleet import EngineState, Fleet
from midflight.gateway.fleet.pauses import OwnedEngine
from midflight.ports import Engine
from midflight.types import EngineHealth

_MAX_DOUBLINGS = 6
"""An engine that falls out again and again is tried after 1, 2, 4, ... up to 64 intervals."""


@dataclass(slots=True)
class _LastToken:
    progress: int
    since: float
    """The time when it last made progress, or was excused."""


class StallWatch:
    """Finds stalls. An engine has stalled if two readings, `stall_seconds` apart, both show work,
    no pause, and the same number of tokens, generated ones and computed prompt tokens together.
    Synchronous.
    """

    def __init__(self, *, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._records: dict[str, _LastToken] = {}

    def read(
        self, engine: str, health: EngineHealth | None, *, now: float, excused: bool = False
    ) -> str | None:
        """Takes a reading. `None` means that the engine did not answer. Returns the fault of the
        engine, or `None` if there is none. An engine that the gateway itself holds is `excused`.
        """
        record = self._records.setdefault(engine, _LastToken(-1, now))
        progress = record.progress if health is None else health.num_tokens + health.num_computed
        if health is not None and (
            progress != record.progress or health.paused or not _has_work(health)
        ):
            record.progress = progress
            record.since = now
        if excused:
            record.since = now
        waited = now - record.since
        if waited < self._stall_seconds:
            return None
        if health is None:
            return f"it has not answered a health check for {waited:.1f} s"
        return (
            f"no token in {waited:.1f} s with {health.num_running} requests running and "
            f"{health.num_waiting} waiting"
        )

    def begin(self, engine: str, *, now: float) -> None:
        """The engine is asked for a reading. If it was never read before, it may be silent for
        `stall_seconds` from now on.
        """
        self._records.setdefault(engine, _LastToken(-1, now))

    def forget(self, engine: str) -> None:
        self._records.pop(engine, None)


def _has_work(health: EngineHealth) -> bool:
    return health.num_running + health.num_waiting > 0


class HealthWatch:
    """Reads every engine once per interval. It puts dead and stalled engines in quarantine, and
    lets recovered ones rejoin.

    An answer may take `stall_seconds`, however short the interval is, because a busy machine
    answers late. An engine is not asked again before it has answered.

    An engine that is in quarantine for its weights rejoins only through a handover (I7).
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        interval_seconds: float,
        stall_seconds: float,
        ends_pauses: bool = True,
    ) -> None:
        """With `ends_pauses` a pause of an engine that rejoins has no owner, and is ended. If there
        is another gateway, the pause may belong to a commit.
        """
        self._fleet = fleet
        self._ends_pauses = ends_pauses
        self._interval_seconds = interval_seconds
        self._answer_seconds = max(interval_seconds, stall_seconds)
        self._asked = set[str]()
        """Engines that have yet to answer."""
        self._progress = StallWatch(stall_seconds=stall_seconds)
        self._lapses: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    async def run(self) -> None:
        """Begins a reading of all engines after every interval. Ended by its task group."""
        async with asyncio.TaskGroup() as checks:
            while True:
                await asyncio.sleep(self._interval_seconds)
                self._begin(checks)

    async def check(self) -> None:
        """Reads all engines at once; waits for the slowest."""
        async with asyncio.TaskGroup() as checks:
            self._begin(checks)

    def _begin(self, checks: asyncio.TaskGroup) -> None:
        states = {state.name: state for state in self._fleet.states()}
        self._forget_detached(states)
        for engine in self._fleet.engines_of("health"):
            if engine.name not in self._asked:
                self._asked.add(engine.name)
                self._progress.begin(engine.name, now=asyncio.get_running_loop().time())
                checks.create_task(
                    self._check_one(engine, states[engine.name]), name=f"health of {engine.name}"
                )

    async def _check_one(self, engine: OwnedEngine, state: EngineState) -> None:
        try:
            async with asyncio.timeout(self._answer_seconds):
                health = await engine.health()
                await engine.renew()
            self._fleet.read(engine.name, num_queued=health.num_waiting)
        except EngineUnavailable as error:
            self._condemn(engine.name, error)
        except (EngineError, OSError):  # a timeout is an OSError
            self._judge(engine.name, None, state)
        else:
            if state.error is None and health.version < state.version:
                restarted = (
                    f"watching engine {engine.name}: it serves version {health.version} "
                    f"after attesting {state.version}."
                )
                self._condemn(
                    engine.name,
                    EngineUnavailable(f"{restarted} It rejoins at the current version."),
                )
            elif state.error is None:
                self._judge(engine.name, health, state)
            elif state.on_probation:
                await self._readmit(engine, health)
        finally:
            self._asked.discard(engine.name)

    def _judge(self, name: str, health: EngineHealth | None, state: EngineState) -> None:
        excused = bool(state.held_by or state.paused_by) and health is not None
        wrong = self._progress.read(
            name, health, now=asyncio.get_running_loop().time(), excused=excused
        )
        if wrong is not None:
            self._condemn(name, EngineUnavailable(f"watching engine {name}: {wrong}. Restart it."))

    def _condemn(self, name: str, error: BaseException) -> None:
        self._progress.forget(name)
        self._fleet.quarantine(name, error, probation=True)
        self._retry_after(name)

    def _retry_after(self, name: str) -> float:
        """The loop's time from which the engine may rejoin. Each lapse doubles the wait."""
        if name not in self._retry_at:
            lapses = self._lapses.get(name, 0)
            self._lapses[name] = lapses + 1
            wait = self._interval_seconds * 2 ** min(lapses, _MAX_DOUBLINGS)
            self._retry_at[name] = asyncio.get_running_loop().time() + wait
        return self._retry_at[name]

    async def _readmit(self, engine: Engine, health: EngineHealth) -> None:
        """Lets an engine rejoin that answers again and serves the fleet's current version. A pause
        without an owner is ended first.
        """
        if asyncio.get_running_loop().time() < self._retry_after(engine.name):
            return
        if health.version != self._fleet.current_version():
            return
        if health.paused and not self._ends_pauses:
            return
        if health.paused:
            try:
                async with asyncio.timeout(self._answer_seconds):
                    await engine.resume()
            except (EngineError, OSError):
                return
        if self._fleet.rejoin(engine.name, health.version):
            self._retry_at.pop(engine.name, None)

    def _forget_detached(self, attached: dict[str, EngineState]) -> None:
        for name in [n for n in self._lapses if n not in attached]:
            self._progress.forget(name)
            self._lapses.pop(name)
            self._retry_at.pop(name, None)
