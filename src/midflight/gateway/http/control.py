"""The operator's pause, resume and abort over all engines, and their routes with the JSON that
SGLang's clients send.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import EngineError, EngineUnavailable, RequestRejected, first_error, nearest
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.ports import Engine, pause_mode, verified_pause
from midflight.types import PauseMode, Version
from midflight.wire.routes import body_of, json_answer, route

OPERATOR = "operator"

PAUSE_NAMES = {
    **{mode.value: mode for mode in PauseMode},
    "in_place": PauseMode.KEEP,
    "retract": PauseMode.RECOMPUTE,
    "wait": PauseMode.DRAIN,
}
"""Pause modes as the project, SGLang and vLLM call them."""


class Control:
    """Pauses and resumes all engines for the operator. One operation at a time, in order of
    arrival.

    Pause while paused: nothing happens, the mode in force stays. Resume while not paused: engines
    that nobody else pauses are told to resume, which is idempotent. Resume during a pause that is
    still under way, or the reverse: it comes after.
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
        """`beside`: those of the engines that answer what is not trained. `pause_seconds`: deadline
        of one engine's pause or resume. `verify_seconds`: time between the two readings that verify
        a pause; larger catches slower engines and makes pausing a busy fleet slower."""
        self._fleet = fleet
        self._generators = (generator, *beside)
        self._pause_seconds = pause_seconds
        self._verify_seconds = verify_seconds
        self._turn = asyncio.Lock()
        self._paused = False
        self._held_since: float | None = None

    @property
    def paused(self) -> bool:
        """Whether the operator's pause is in force."""
        return self._paused

    @property
    def paused_since(self) -> float | None:
        """When the operator began to hold requests, in the loop's time; none while requests are not
        held.
        """
        return self._held_since

    @property
    def num_active(self) -> int:
        """Answers that engines have, or that wait for one."""
        return sum(generator.num_active for generator in self._generators)

    def served_version(self) -> Version:
        return self._fleet.served_version()

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Holds new requests at the gate and pauses every engine; returns when no token is made any
        more.

        Waits for the engines, each at most `pause_seconds` (a drain: the deadline of a request
        besides), and for `verify_seconds`. If one refuses or ignores it, all are resumed and its
        error is raised. An engine that is dead or silent does not refuse: it goes into quarantine
        and the pause stands.
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
        """Resumes the engines and lifts the operator's hold, no other. Waits for the engines,
        `pause_seconds` at most.

        Cancelled half way, the pause is still in force and can be resumed again.
        """
        async with self._turn:
            await _each(self._healthy(), self._let_go)
            self._paused = False
            self._release()

    async def abort(self, request_id: str | None) -> int:
        """Aborts one request, or all (`None`), at the engines; says how many were found. Never
        waits.

        Callers of native `/generate` get their tokens so far; for all others the request is resumed
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
        """Engines out of quarantine: a pause of the others has ended with it."""
        broken = {
            state.name
            for fleet in self._fleets
            for state in fleet.states()
            if state.error is not None
        }
        return [
            engine
            for fleet in self._fleets
            for engine in fleet.engines_of(OPERATOR)
            if engine.name not in broken
        ]

    def _quarantine(self, engine: Engine, error: BaseException) -> None:
        """In the fleet that has it; the others know no engine of that name."""
        for fleet in self._fleets:
            fleet.quarantine(engine.name, error, probation=True)

    async def _pause(self, engine: Engine, mode: PauseMode, undo: AsyncExitStack) -> None:
        """Also an engine at rest is read twice, but without a wait between: what makes no token now
        makes none later.
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
        """Every pause ends in resume or in quarantine: never raises an engine's error."""
        try:
            async with self._answering(engine, seconds=self._pause_seconds):
                await engine.resume()
        except EngineError as error:
            self._quarantine(engine, error)

    @asynccontextmanager
    async def _answering(self, engine: Engine, *, seconds: float) -> AsyncGenerator[None]:
        """Around calls to an engine: one that is dead or silent goes into quarantine, other errors
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
    """Acts on all engines at once and waits for all; the first error cancels the others and is
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


# --- Routes ---------------------------------------------------------------------------------------


class OperatorPause(msgspec.Struct, frozen=True):
    """Fields that other servers know are ignored, here and in `OperatorAbort`."""

    mode: str | None = None


class OperatorAbort(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class OperatorAborts(msgspec.Struct, frozen=True):
    """As vLLM's clients send it; without ids all requests are meant."""

    request_ids: list[str] | None = None


class ControlRoutes:
    """SGLang's `/pause_generation`, `/continue_generation`, `/abort_request` and `/flush_cache`,
    vLLM's `/pause`, `/resume`, `/is_paused`, `/abort_requests` and `/reset_prefix_cache`, for
    whoever has `token`, where there is one."""

    def __init__(self, control: Control, *, token: str | None) -> None:
        self._control = control
        self._token = token

    def routes(self) -> Sequence[BaseRoute]:
        verbs = {
            **dict.fromkeys(("/pause_generation", "/pause"), self._pause),
            **dict.fromkeys(("/continue_generation", "/resume"), self._resume),
            **dict.fromkeys(
                ("/abort_requests", "/inference/v1/abort_requests"), self._abort_several
            ),
            **dict.fromkeys(("/flush_cache", "/reset_prefix_cache"), self._flush),
            "/abort_request": self._abort,
        }
        asked = {"/is_paused": self._is_paused, "/flush_cache": self._flush}
        found = [route(path, verb, token=self._token) for path, verb in verbs.items()]
        return [
            *found,
            *(route(path, verb, token=self._token, method="GET") for path, verb in asked.items()),
        ]

    async def _pause(self, request: Request) -> Response:
        """vLLM's clients name the mode in the address. Without one each engine pauses in the mode
        that costs it least, on either route.
        """
        name = (await body_of(request, OperatorPause)).mode or request.query_params.get("mode")
        if name is not None and name not in PAUSE_NAMES:
            raise RequestRejected(
                f"mode is {name[:80]!r}: not a way to pause.{nearest(name, PAUSE_NAMES)}",
                param="mode",
            )
        mode = None if name is None else PAUSE_NAMES[name]
        await self._control.pause(mode)
        if mode is PauseMode.ABORT:
            await self._control.abort(None)
        return json_answer({"status": "ok", "message": "Generation is paused."})

    async def _resume(self, request: Request) -> Response:
        await self._control.resume()
        return json_answer({"status": "ok", "message": "Generation continues."})

    async def _abort(self, request: Request) -> Response:
        asked = await body_of(request, OperatorAbort)
        if asked.rid is None and not asked.abort_all:
            raise RequestRejected(
                'rid is missing: send the id of a request, or "abort_all": true.', param="rid"
            )
        found = await self._control.abort(None if asked.abort_all else asked.rid)
        return json_answer({"status": "ok", "num_aborted": found})

    async def _abort_several(self, request: Request) -> Response:
        wanted = (await body_of(request, OperatorAborts)).request_ids
        found = sum([await self._control.abort(each) for each in wanted or (None,)])
        return json_answer({"status": "aborted", "aborted": found})

    async def _is_paused(self, request: Request) -> Response:
        return json_answer({"is_paused": self._control.paused})

    async def _flush(self, request: Request) -> Response:
        """Cached keys belong to the weights that made them: engines never use them under others, so
        there is nothing to do.
        """
        return json_answer(
            {
                "status": "ok",
                "message": "Nothing is to be flushed: keys are used under their own weights only.",
            }
        )
