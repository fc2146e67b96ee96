"""The operator's pause, resume and abort over all engines."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from midflight.errors import EngineError, EngineUnavailable, first_error
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.ports import Engine, pause_mode, verified_pause
from midflight.types import PauseMode, Version

OPERATOR = "operator"


class Control:
    """Pauses and resumes all engines for the operator. There is one operation at a time, in order
    of arrival.

    A pause while paused does nothing, and the mode in force remains. A resume while not paused
    tells engines without another pause to resume, which is idempotent. A resume during a pause that
    is still under way comes after it, and the reverse.
    """

    def __init__(
        self,
        fleet: Fleet,
        generator: Generator,
        *,
        beside: Sequence[Generator] = (),
        pause_seconds: float = 30.0,
        verify_seconds: float = 0.1,
    ) -> None:
        """`beside` are the generators of the engines that answer untrained requests.
        `pause_seconds` is the deadline of one engine's pause or resume. `verify_seconds` is the
        time between the two readings that verify a pause. A larger value catches slower engines and
        makes pausing a busy fleet slower.
        """
        self._fleet = fleet
        self._generators = (generator, *beside)
        self._pause_seconds = pause_seconds
        self._verify_seconds = verify_seconds
        self._turn = asyncio.Lock()
        self._paused = False
        self._held_since: float | None = None

    @property
    def paused(self) -> bool:
        """True if the operator's pause is in force."""
        return self._paused

    @property
    def paused_since(self) -> float | None:
        """The time when the operator began to hold requests, by the loop's clock. It is None while
        requests are not held.
        """
        return self._held_since

    @property
    def num_active(self) -> int:
        """Answers that engines generate, or that wait for an engine."""
        return sum(generator.num_active for generator in self._generators)

    def served_version(self) -> Version:
        return self._fleet.served_version()

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Holds new requests and pauses every engine; returns when no engine makes tokens any more.

        Waits for the engines, each at most `pause_seconds` (for a drain, the deadline of a request
        is added), and for `verify_seconds`. If an engine refuses or ignores the pause, all are
        resumed and its error is raised. An engine that is dead or silent does not refuse: it goes
        into quarantine and the pause stays in force.
        """
        async with self._turn:
            if self._paused:
                return
            modes = {engine.name: _mode(engine, mode) for engine in self._healthy()}
            self._hold()
            async with AsyncExitStack() as undo:
                undo.callback(self._release)
                await _each(
                    self._healthy(), lambda engine: self._pause(engine, modes[engine.name], undo)
                )
                undo.pop_all()
            self._paused = True

    async def resume(self) -> None:
        """Resumes the engines and lifts the operator's hold, but no other hold. Waits for the
        engines, `pause_seconds` at most.

        If it is cancelled half way, the pause is still in force and can be resumed again.
        """
        async with self._turn:
            await _each(self._healthy(), self._let_go)
            self._paused = False
            self._release()

    async def abort(self, request_id: str | None) -> int:
        """Aborts one request, or all (`None`), at the engines; returns how many were found. Never
        waits.

        Clients of native `/generate` get their tokens so far; for all others the request is resumed
        (see `Generator`).
        """
        return sum(generator.cancel(request_id) for generator in self._generators)

    def _hold(self) -> None:
        self._held_since = asyncio.get_running_loop().time()
        for fleet in self._fleets:
            fleet.hold_all(OPERATOR)

    def _release(self) -> None:
        """Idempotent."""
        self._held_since = None
        for fleet in self._fleets:
            fleet.release_all(OPERATOR)

    @property
    def _fleets(self) -> list[Fleet]:
        return [generator.fleet for generator in self._generators]

    def _healthy(self) -> list[Engine]:
        """The engines out of quarantine. The quarantine of the others has ended their pauses."""
        broken: set[str] = set()
        engines: list[Engine] = []
        for fleet in self._fleets:
            broken |= {state.name for state in fleet.states() if state.error is not None}
            engines += fleet.engines_of(OPERATOR)
        return [engine for engine in engines if engine.name not in broken]

    def _quarantine(self, engine: Engine, error: BaseException) -> None:
        """Puts an engine in quarantine. Fleets without an engine of that name ignore the call."""
        for fleet in self._fleets:
            fleet.quarantine(engine.name, error, probation=True)

    async def _pause(self, engine: Engine, mode: PauseMode, undo: AsyncExitStack) -> None:
        """Pauses one engine and verifies it by two readings. For an idle engine there is no wait
        between them, because a paused engine without requests stays idle.
        """
        undo.push_async_callback(self._let_go, engine)
        drain_seconds = self._generators[0].request_seconds if mode is PauseMode.DRAIN else 0.0
        async with (
            self._answering(engine, seconds=self._pause_seconds + drain_seconds),
            verified_pause(engine, mode) as reading,
        ):
            if reading.num_running + reading.num_waiting:
                await asyncio.sleep(self._verify_seconds)

    async def _let_go(self, engine: Engine) -> None:
        """Resumes one engine, or puts it in quarantine. Never raises an engine's error."""
        try:
            async with self._answering(engine, seconds=self._pause_seconds):
                await engine.resume()
        except EngineError as error:
            self._quarantine(engine, error)

    @asynccontextmanager
    async def _answering(self, engine: Engine, *, seconds: float) -> AsyncGenerator[None]:
        """Guards calls to an engine: a dead or silent engine goes into quarantine. Other errors
        pass.
        """
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            error = EngineUnavailable(
                f"pausing or resuming {engine.name}: no answer in {seconds:g} s. Restart it, or "
                "raise run.stall_seconds if it is only slow."
            )
            self._quarantine(engine, error)
        except (EngineUnavailable, OSError) as error:
            self._quarantine(engine, error)


def _mode(engine: Engine, wanted: PauseMode | None) -> PauseMode:
    return pause_mode(engine.name, engine.capabilities, wanted, remedy="choose one of these")


async def _each(engines: Iterable[Engine], act: Callable[[Engine], Awaitable[None]]) -> None:
    """Acts on all engines at once and waits for all. The first error cancels the others and is
    raised as it is.
    """

    async def run(engine: Engine) -> None:
        await act(engine)

    try:
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(run(engine), name=f"control of {engine.name}")
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
