"""The operator's pause, resume and abort: what `/pause_generation`, `/continue_generation` and `/abort_request` do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack

from midflight.errors import EngineError, EngineUnavailable, NotSupported, PauseIgnored
from midflight.gateway.answers.resume import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.ports import Engine
from midflight.types import EngineHealth, PauseMode

OPERATOR = "operator"

_PREFERENCE = (PauseMode.KEEP, PauseMode.RECOMPUTE, PauseMode.ABORT, PauseMode.DRAIN)
"""Which mode an engine pauses in when the operator names none: the one that costs it least."""


class Control:
    """Pauses and resumes all engines for the operator. One operation at a time, in order of arrival (P13).

    Pause while paused: nothing happens, the mode in force stays. Resume while not paused: engines that nobody else pauses
    are told to resume, which is idempotent. Resume during a pause that is still under way, or the reverse: it comes after.
    """

    def __init__(self, fleet: Fleet, generator: Generator, *, pause_seconds: float = 30.0, verify_seconds: float = 0.1) -> None:
        """`pause_seconds`: deadline of each call to an engine. `verify_seconds`: time between the two readings that verify a
        pause; larger catches slower engines and makes pausing a busy fleet slower."""
        self._fleet = fleet
        self._generator = generator
        self._pause_seconds = pause_seconds
        self._verify_seconds = verify_seconds
        self._turn = asyncio.Lock()
        self._paused = False
        self._held_since: float | None = None
        self._held_seconds = 0.0

    def paused_seconds(self) -> float:
        """Time the operator has held requests so far, a pause that goes on included: deadlines do not count it."""
        now = asyncio.get_running_loop().time()
        return self._held_seconds + (now - self._held_since if self._held_since is not None else 0.0)

    @property
    def paused(self) -> bool:
        """Whether the operator's pause is in force."""
        return self._paused

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Holds new requests at the gate and pauses every engine; returns when no token is made any more (P9).

        Waits for the engines, each at most `pause_seconds` (a drain: the deadline of a request besides), and for
        `verify_seconds`. If one refuses or ignores it, all are resumed and its error is raised (P10). An engine that is dead
        or silent does not refuse: it goes into quarantine and the pause stands.
        """
        async with self._turn:
            if self._paused:
                return
            modes = {engine.name: _mode(engine, mode) for engine in self._healthy()}
            self._hold()
            async with AsyncExitStack() as guard:
                guard.callback(self._release)
                await _each(self._healthy(), lambda engine: self._pause(engine, modes[engine.name], guard))
                await _each(self._healthy(), self._verify)
                guard.pop_all()
            self._paused = True

    async def resume(self) -> None:
        """Resumes the engines and lifts the operator's hold, only his. Waits for the engines, `pause_seconds` at most.

        Cancelled half way, the pause is still in force and can be resumed again.
        """
        async with self._turn:
            await _each(self._healthy(), self._let_go)
            self._paused = False
            self._release()

    async def abort(self, request_id: str | None) -> int:
        """Aborts one request, or all (`None`), at the engines; says how many were found. Never waits.

        Callers of native `/generate` get their tokens so far; for all others the request is resumed (see `Generator`).
        """
        return self._generator.cancel(request_id)

    def _hold(self) -> None:
        self._held_since = asyncio.get_running_loop().time()
        self._fleet.hold_all(OPERATOR)

    def _release(self) -> None:
        """Idempotent."""
        self._held_seconds, self._held_since = self.paused_seconds(), None
        self._fleet.release_all(OPERATOR)

    def _healthy(self) -> list[Engine]:
        """Engines out of quarantine: a pause of the others has ended with it."""
        broken = {state.name for state in self._fleet.states() if state.error is not None}
        return [engine for engine in self._fleet.engines_of(OPERATOR) if engine.name not in broken]

    async def _pause(self, engine: Engine, mode: PauseMode, guard: AsyncExitStack) -> None:
        guard.push_async_callback(self._let_go, engine)
        drain_seconds = self._generator.request_seconds if mode is PauseMode.DRAIN else 0.0
        await self._call(engine, lambda: engine.pause(mode), seconds=self._pause_seconds + drain_seconds)

    async def _verify(self, engine: Engine) -> None:
        """Two readings with equal `num_tokens`, or one without any work; an engine that goes on raises `PauseIgnored`."""
        first = await self._read(engine)
        if first is None or first.num_running + first.num_waiting == 0:
            return
        await asyncio.sleep(self._verify_seconds)
        second = await self._read(engine)
        if second is not None and second.num_tokens > first.num_tokens:
            raise PauseIgnored(
                f"pausing {engine.name}: it made {second.num_tokens - first.num_tokens} tokens in {self._verify_seconds:g} s after it "
                f"said it was paused. All engines were resumed. Detach {engine.name}, or pause in another mode."
            )

    async def _read(self, engine: Engine) -> EngineHealth | None:
        readings: list[EngineHealth] = []

        async def read() -> None:
            readings.append(await engine.health())

        await self._call(engine, read, seconds=self._pause_seconds)
        return readings[0] if readings else None

    async def _let_go(self, engine: Engine) -> None:
        """Every pause ends in resume or in quarantine (DECISIONS 18): never raises an engine's error."""
        try:
            await self._call(engine, engine.resume, seconds=self._pause_seconds)
        except EngineError as error:
            self._fleet.quarantine(engine.name, error, probation=True)

    async def _call(self, engine: Engine, call: Callable[[], Awaitable[None]], *, seconds: float) -> None:
        """Waits for a call to an engine; one that is dead or silent goes into quarantine, other errors pass."""
        try:
            async with asyncio.timeout(seconds):
                await call()
        except TimeoutError:
            error = EngineUnavailable(f"pausing or resuming {engine.name}: no answer in {seconds:g} s. Restart it.")
            self._fleet.quarantine(engine.name, error, probation=True)
        except (EngineUnavailable, OSError) as error:
            self._fleet.quarantine(engine.name, error, probation=True)


def _mode(engine: Engine, wanted: PauseMode | None) -> PauseMode:
    """The mode an engine is paused in: the one wanted, else the first it has; `NotSupported` names what it has."""
    has = engine.capabilities.pause_modes
    for mode in _PREFERENCE if wanted is None else (wanted,):
        if mode in has:
            return mode
    raise NotSupported(
        f"pausing {engine.name} by {wanted or 'any mode'}: it can {', '.join(sorted(has)) or 'not be paused'}. Choose one of these."
    )


async def _each(engines: Iterable[Engine], act: Callable[[Engine], Awaitable[None]]) -> None:
    """Acts on all engines at once and waits for all; the first error cancels the others and is raised as it is."""

    async def run(engine: Engine) -> None:
        await act(engine)

    try:
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(run(engine), name=f"control of {engine.name}")
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
