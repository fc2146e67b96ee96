"""An engine over HTTP: the routes by which a rollout process uses it, and those by which an
operator gives it weights.

And its end of the multiplexed wire: what its requests get in one moment is one frame.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `_WireClient.serve` (one each client) | frames of the client | the next | the client; its leaving ends it |
| `Outbox.drain` | frames to the client | the next | the engine's steps; the engine's end ends it |
| `_ChunkClient._read` (one each request) | chunks of any engine | the next | the engine; an abort, which cancels it |
| `_StepClient._compile` (one each request with a grammar) | nothing | the grammar | the thread that compiles it; an abort, which cancels it |
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Generic, Protocol, TypeVar, cast

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.engines import wire
from midflight.engines.streams import Outlet, StepOutput
from midflight.errors import (
    EngineError,
    EngineUnavailable,
    MidflightError,
    NotSupported,
    Overloaded,
    RequestRejected,
)
from midflight.ports import Engine, PromptScorer, Scorer
from midflight.text.tokenizer import Tokenizer
from midflight.types import (
    Chunk,
    EngineHealth,
    Feature,
    GenerateRequest,
    PauseMode,
    Version,
    WeightManifest,
)
from midflight.wire import edge
from midflight.wire.edge import (
    PACKED,
    RequireToken,
    body_of,
    json_answer,
    metrics_route,
    read_body,
    route,
    with_client,
)

_MAX_FRAMES = 16_384
"""Steps a client may lag behind; one that lags more is cut off, so that its frames do not fill the
memory.
"""


class ServedEngine(Engine, Protocol):
    """What an engine needs beside its port to be served over the wire."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """As the port has it; it must be closable, because clients leave."""
        ...

    def reading(self) -> EngineHealth:
        """The present numbers, at once, also of an engine that has ended."""
        ...


class SteppedEngine(ServedEngine, Protocol):
    """An engine that gives out whole steps to outlets; see `EmbeddedEngine`."""

    def open_outlet(self, outlet: Outlet) -> int: ...
    def close_outlet(self, number: int, handles: frozenset[int]) -> None: ...
    async def submit(self, request: GenerateRequest, *, outlet: int) -> int: ...
    def abort_handles(self, handles: frozenset[int]) -> None: ...


def unheard() -> None:
    """Nobody wants to hear that an engine works."""


async def relay(
    engine: ServedEngine, socket: WebSocket, *, worked: Callable[[], None] = unheard
) -> None:
    """Serves one client of any engine, until the client leaves or lags too far behind, which closes
    the streams of its requests. `worked` is called before tokens are sent."""
    await _ChunkClient(engine, worked).serve(socket)


async def relay_steps(
    engine: SteppedEngine, socket: WebSocket, *, worked: Callable[[], None] = unheard
) -> None:
    """The same for an engine of whole steps: each is one frame. Ends also when the engine does."""
    client = _StepClient(engine, worked)
    try:
        await client.serve(socket)
    finally:
        client.close()


class Outbox:
    """Frames on their way to one client of the wire."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def send(self, frame: wire.EngineFrame) -> None:
        """Sends a frame later. After a frame that found no room none is sent: the client is cut off
        after those before it.
        """
        if self._error is None and len(self._frames) >= _MAX_FRAMES:
            self.fail(
                EngineUnavailable(
                    f"the client reads too slowly: {_MAX_FRAMES} frames wait. Attach again."
                )
            )
        if self._error is None:
            self._frames.append(wire.encode(frame))
            self._changed.set()

    def reject(self, handle: int, error: Exception) -> None:
        """Ends one request, by the client's number. A fault of ours is logged, and costs no other
        request.
        """
        edge.log_unexpected(error)
        if not isinstance(error, MidflightError):
            error = EngineError(f"generating: {edge.FAILED_HERE}")
        param = error.param if isinstance(error, RequestRejected) else None
        retry_after = error.retry_after_seconds if isinstance(error, Overloaded) else None
        self.send(wire.Rejected(handle, error.code, str(error), param, retry_after))

    def fail(self, error: Exception) -> None:
        """Tells the client the engine's end, after the frames before it."""
        self._error = error
        self._changed.set()

    async def drain(self, socket: WebSocket) -> None:
        """Waits for frames; ended by the end of the engine, which closes the socket, or of the
        connection.
        """
        # Starlette raises RuntimeError when it sends on a socket that is closed already.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while self._frames or self._error is None:
                while self._frames:
                    await socket.send_bytes(self._frames.popleft())
                self._changed.clear()
                if self._error is None:
                    await self._changed.wait()
            await socket.close(code=1011, reason=str(self._error)[:100])


class _WireClient:
    """The connection to one client, which numbers its requests."""

    def __init__(self, engine: ServedEngine, worked: Callable[[], None]) -> None:
        """`worked` is called before tokens are sent."""
        self.worked = worked
        self.outbox = Outbox()
        self.outbox.send(wire.Hello(engine.name, engine.capabilities))
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """By the client's number, the requests for which something is awaited here."""

    async def serve(self, socket: WebSocket) -> None:
        """Waits for the client's frames, until it leaves, lags too far behind, or the engine
        ends.
        """
        await socket.accept()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self.outbox.drain(socket))
            # Losses end the task group without an error: an error in it could hide a cancellation
            # that comes at the same time.
            with contextlib.suppress(WebSocketDisconnect, EngineUnavailable, msgspec.DecodeError):
                while True:
                    for raw in wire.decode_client_frames(await socket.receive_bytes()):
                        await self._hear(wire.client_frame(raw), tasks)
            for task in (sending, *self.tasks.values()):
                task.cancel()

    async def _hear(
        self, frame: wire.ClientFrame | wire.Rejected, tasks: asyncio.TaskGroup
    ) -> None:
        if isinstance(frame, wire.Submit):
            await self.start(frame.handle, frame.request, tasks)
        elif isinstance(frame, wire.Rejected):
            self.outbox.send(frame)
        elif frame.handle in self.tasks:
            self.tasks[frame.handle].cancel()
        else:
            self.abort(frame)

    async def start(self, number: int, request: GenerateRequest, tasks: asyncio.TaskGroup) -> None:
        """Never raises an error of the request, which is answered."""
        raise NotImplementedError

    def abort(self, frame: wire.Abort) -> None:
        """Of a request for which nothing is awaited here: one that has ended, unless the engine has
        it.
        """


class _ChunkClient(_WireClient):
    """Each request is read by a task of its own; their chunks gather until the event loop has been
    round once.
    """

    def __init__(self, engine: ServedEngine, worked: Callable[[], None]) -> None:
        super().__init__(engine, worked)
        self._engine = engine
        self._gathered: list[tuple[int, Chunk]] = []
        """Of one version, in order of arrival."""
        self._since = 0.0
        """When the work began whose tokens the next frame brings: at the last frame, or at the
        first request after a rest.
        """

    async def start(self, number: int, request: GenerateRequest, tasks: asyncio.TaskGroup) -> None:
        if not self.tasks:
            self._since = asyncio.get_running_loop().time()
        task = self.tasks[number] = tasks.create_task(self._read(number, request))
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    async def _read(self, number: int, request: GenerateRequest) -> None:
        """Waits for the engine's chunks; ended by the last of them, an error, the client's abort or
        its disconnection.
        """
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    self._gather(number, chunk)
                    if chunk.finish is not None:
                        return
            raise EngineUnavailable(
                "reading an engine's stream: it ended without a finish. Check the engine and its "
                "adapter."
            )
        except Exception as error:  # the edge: every error ends its request
            self._flush()
            self.outbox.reject(number, error)

    def _gather(self, number: int, chunk: Chunk) -> None:
        if not wire.can_carry(chunk):
            raise EngineUnavailable(
                f"reading a chunk of {len(chunk.token_ids)} tokens: it is malformed. Check the "
                "engine and its adapter."
            )
        if self._gathered and self._gathered[0][1].version != chunk.version:
            self._flush()
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered.append((number, chunk))

    def _flush(self) -> None:
        gathered = self._gathered
        self._gathered = []
        if gathered:
            self.worked()
            started = self._since
            self._since = asyncio.get_running_loop().time()
            self.outbox.send(
                wire.pack_chunks(
                    gathered, started=started, ended=self._since, num_running=len(self.tasks)
                )
            )


class _StepClient(_WireClient):
    """An outlet: the engine has the requests, and gives whole steps. Outside requests have the
    client's numbers, inside handles.
    """

    def __init__(self, engine: SteppedEngine, worked: Callable[[], None]) -> None:
        super().__init__(engine, worked)
        self._engine = engine
        self._outlet = engine.open_outlet(self)
        self._numbers: dict[int, int] = {}
        """The client's number of each live handle."""

    def put(self, step: StepOutput) -> None:
        if step.handles.size:
            self.worked()
        self.outbox.send(wire.pack_step(step, self._numbers))
        for handle, _, _ in step.finishes:
            self._numbers.pop(handle, None)
        for handle, _, error in step.failures:
            self.outbox.reject(self._numbers.pop(handle), error)

    def fail(self, error: Exception) -> None:
        self.outbox.fail(error)

    def close(self) -> None:
        self._engine.close_outlet(self._outlet, frozenset(self._numbers))

    async def start(self, number: int, request: GenerateRequest, tasks: asyncio.TaskGroup) -> None:
        """A request with a grammar waits for it in a task of its own; any other is submitted at
        once.
        """
        if request.sampling.grammar is None:
            await self._submit(number, request)
            return
        task = self.tasks[number] = tasks.create_task(self._compile(number, request))
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    def abort(self, frame: wire.Abort) -> None:
        self._engine.abort_handles(
            frozenset(handle for handle, number in self._numbers.items() if number == frame.handle)
        )

    async def _compile(self, number: int, request: GenerateRequest) -> None:
        """Waits for the grammar; ended by the client's abort or its disconnection. `Outbox.drain`
        tells the end of the engine.
        """
        with contextlib.suppress(EngineUnavailable):
            await self._submit(number, request)

    async def _submit(self, number: int, request: GenerateRequest) -> None:
        """Waits for what the engine's `submit` waits for. An error is an answer, but the engine's
        end (`EngineUnavailable`).
        """
        try:
            self._numbers[await self._engine.submit(request, outlet=self._outlet)] = number
        except EngineUnavailable:
            raise
        except Exception as error:  # the edge: every other error ends its request
            self.outbox.reject(number, error)


E = TypeVar("E", bound=ServedEngine)


class EnginePause(msgspec.Struct, frozen=True):
    mode: PauseMode


class EngineAbort(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class EnginePrompt(msgspec.Struct, frozen=True):
    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    top: Annotated[int, msgspec.Meta(ge=0, le=20)]


class EngineCommit(msgspec.Struct, frozen=True):
    version: Annotated[Version, msgspec.Meta(ge=0, lt=wire.END_OF_INTS)]


def build_app(
    engine: E,
    serve: Callable[[E, WebSocket], Awaitable[None]],
    *,
    token: str | None,
    scorer: Scorer | None = None,
    beside: Sequence[BaseRoute] = (),
    worked: Callable[[], None] = unheard,
) -> ASGIApp:
    """The application of an engine process. With a token, everything but `/health` needs it as
    bearer. See `EngineRoutes`.

    The engine's `run`, if it has one, is the caller's to start. `beside`: further routes, such as
    what it says of itself. `worked` is called before scores are sent; `serve` has its own.
    """
    routes = EngineRoutes(engine, serve, scorer=scorer, worked=worked)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine.reading))
    app = Starlette(
        routes=[*routes.wire(), *beside, routes.health("/health"), metrics_route(registry)]
    )
    return app if token is None else RequireToken(app, token)


class EngineRoutes(Generic[E]):
    """Routes that speak to one engine."""

    def __init__(
        self,
        engine: E,
        serve: Callable[[E, WebSocket], Awaitable[None]],
        *,
        scorer: Scorer | None = None,
        committed: Callable[[Version], None] = lambda version: None,
        worked: Callable[[], None] = unheard,
    ) -> None:
        """`serve` is the engine's end of the wire to one client, until that leaves: `relay` does
        for any engine. `scorer` is the engine again, where it can score. `committed` is told each
        version that the engine has attested, and `worked` is called before scores are sent."""
        self._engine = engine
        self._serve = serve
        self._scorer = scorer
        self._committed = committed
        self._worked = worked

    def wire(self) -> Sequence[BaseRoute]:
        """What `RemoteEngine` asks."""
        verbs = {
            "pause": self._pause,
            "resume": self._resume,
            "abort": self._abort,
            "stage": self._stage,
            "commit": self._commit,
            "score": self._score,
            "prompt_logprobs": self._prompt_logprobs,
        }

        async def stream(socket: WebSocket) -> None:
            await self._serve(self._engine, socket)

        routes = [route(f"{wire.PREFIX}/{name}", verb) for name, verb in verbs.items()]
        return [
            *routes,
            self.health(f"{wire.PREFIX}/health"),
            WebSocketRoute(wire.STREAM_PATH, stream),
        ]

    def operator(self) -> Sequence[BaseRoute]:
        """Weight updates, for whoever runs one engine without a trainer."""
        return [route("/stage_weights", self._stage), route("/commit_weights", self._commit)]

    def health(self, path: str) -> BaseRoute:
        """200 while the engine lives, 503 after; the numbers show progress."""

        async def health(request: Request) -> Response:
            return json_answer(await self._engine.health())

        return route(path, health, method="GET")

    async def _pause(self, request: Request) -> Response:
        await self._engine.pause((await body_of(request, EnginePause)).mode)
        return json_answer({"status": "ok"})

    async def _resume(self, request: Request) -> Response:
        await self._engine.resume()
        return json_answer({"status": "ok"})

    async def _abort(self, request: Request) -> Response:
        body = await body_of(request, EngineAbort)
        if body.rid is None and not body.abort_all:
            raise RequestRejected(
                'aborting: the body names no request. Send {"rid": ...} or {"abort_all": true}.',
                param="rid",
            )
        await self._engine.abort(None if body.abort_all else body.rid)
        return json_answer({"status": "ok"})

    async def _stage(self, request: Request) -> Response:
        manifest = await body_of(request, WeightManifest)
        if not 0 <= manifest.version < wire.END_OF_INTS:
            raise RequestRejected(
                f"version is {manifest.version}: send one from 0 to {wire.END_OF_INTS - 1}.",
                param="version",
            )
        await self._engine.stage(manifest)
        return json_answer({"status": "ok"})

    async def _commit(self, request: Request) -> Response:
        attestation = await self._engine.commit((await body_of(request, EngineCommit)).version)
        self._committed(attestation.version)
        return json_answer(attestation)

    async def _score(self, request: Request) -> Response:
        if self._scorer is None:
            raise NotSupported(
                f"scoring: engine {self._engine.name!r} only generates. Ask an embedded engine."
            )
        token_ids, row_offsets, temperature = wire.decode_rows(await read_body(request.receive))
        scores = await with_client(
            request.receive, self._scorer.score(token_ids, row_offsets, temperature=temperature)
        )
        self._worked()
        return Response(wire.encode_scores(scores), media_type=PACKED)

    async def _prompt_logprobs(self, request: Request) -> Response:
        asked = await body_of(request, EnginePrompt)
        if Feature.PROMPT_LOGPROBS not in self._engine.capabilities.features:
            raise NotSupported(
                f"scoring a prompt: engine {self._engine.name!r} only generates. Ask an embedded "
                "engine."
            )
        scoring = cast(PromptScorer, self._engine).prompt_logprobs(asked.token_ids, top=asked.top)
        return json_answer(await with_client(request.receive, scoring))


class EngineCollector(Collector):
    """The engine's numbers for Prometheus, read when they are scraped."""

    def __init__(self, reading: Callable[[], EngineHealth]) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        health = self._reading()
        yield CounterMetricFamily(
            "midflight_engine_output_tokens",
            "Output tokens since the engine started",
            value=health.num_tokens,
        )
        yield CounterMetricFamily(
            "midflight_engine_computed_tokens",
            "Tokens that went through the model",
            value=health.num_computed,
        )
        yield CounterMetricFamily(
            "midflight_engine_reused_tokens",
            "Tokens of prompts whose keys were there",
            value=health.num_reused,
        )
        yield GaugeMetricFamily(
            "midflight_engine_running_requests",
            "Requests decoded together",
            value=health.num_running,
        )
        yield GaugeMetricFamily(
            "midflight_engine_waiting_requests",
            "Requests waiting for a slot",
            value=health.num_waiting,
        )
        yield GaugeMetricFamily(
            "midflight_engine_weight_version", "Version of the weights served", value=health.version
        )
        yield GaugeMetricFamily(
            "midflight_engine_paused", "1 while paused", value=float(health.paused)
        )
