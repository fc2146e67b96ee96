"""An engine over HTTP: SGLang's control plane in JSON, and the multiplexed wire for gateways."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute
from starlette.websockets import WebSocket

from midflight.engines.generate_body import Answer, GenerateBody, read_request
from midflight.engines.metrics import EngineCollector
from midflight.engines.relay import ServedEngine
from midflight.engines.wire import SCORE_PATH, STREAM_PATH, decode_rows, encode_scores
from midflight.errors import MidflightError, NotSupported, RequestRejected
from midflight.ports import Scorer
from midflight.types import Capabilities, Chunk, PauseMode, WeightManifest
from midflight.wire.edge import ClientGone, fault_of, read_body, with_client
from midflight.wire.routes import PACKED, body_of, guarded_socket, json_answer, metrics_route, route

E = TypeVar("E", bound=ServedEngine)
_PAUSE_NAMES = {**{mode.value: mode for mode in PauseMode}, "in_place": PauseMode.KEEP, "retract": PauseMode.RECOMPUTE}


class EnginePause(msgspec.Struct, frozen=True):
    mode: str = PauseMode.ABORT.value


class EngineAbort(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class EngineCommit(msgspec.Struct, frozen=True):
    version: int


class ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str
    capabilities: Capabilities


def build_app(engine: E, serve: Callable[[E, WebSocket], Awaitable[None]], *, token: str | None, scorer: Scorer | None = None) -> Starlette:
    """The ASGI application. `serve` is the engine's end of the wire to one client, until that leaves: `relay` does for any engine.

    With a token, everything but `/health` needs it as bearer. The engine's `run`, if it has one, is the caller's to start.
    `scorer` is the engine again, where it can score.
    """

    async def stream(socket: WebSocket) -> None:
        await serve(engine, socket)

    return Starlette(routes=[*_Endpoints(engine, scorer, token).routes(), guarded_socket(STREAM_PATH, stream, token=token)])


class _Endpoints:
    def __init__(self, engine: ServedEngine, scorer: Scorer | None, token: str | None) -> None:
        self._engine, self._scorer, self._token = engine, scorer, token
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine.reading))

    def routes(self) -> list[BaseRoute]:
        posts = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/stage_weights": self.stage,
            "/commit_weights": self.commit,
            SCORE_PATH: self.score,
        }
        return [
            *(route(path, verb, token=self._token) for path, verb in posts.items()),
            route("/model_info", self.model_info, token=self._token, method="GET"),
            metrics_route(self._registry, token=self._token),
            route("/health", self.health, method="GET"),
        ]

    async def generate(self, request: Request) -> Response:
        body = await body_of(request, GenerateBody)
        asked = read_request(body, self._engine.tokenizer)
        answer = Answer(asked, self._engine.tokenizer, logprobs=body.return_logprob)
        chunks = self._engine.generate(asked)
        # The first chunk is awaited here, so that a refusal has its own status also where the answer streams.
        try:
            first = await with_client(request.receive, anext(chunks))
        except ClientGone:
            await chunks.aclose()
            raise
        answer.add(first)
        if body.stream:
            return StreamingResponse(_events(chunks, answer), media_type="text/event-stream")
        finished = await with_client(request.receive, _collect(chunks, answer))
        return json_answer(finished.body())

    async def pause(self, request: Request) -> Response:
        mode = (await body_of(request, EnginePause)).mode
        if mode not in _PAUSE_NAMES:
            raise RequestRejected(f"pausing: mode is {mode!r}. Send one of {', '.join(sorted(_PAUSE_NAMES))}.", param="mode")
        await self._engine.pause(_PAUSE_NAMES[mode])
        return json_answer({"status": "ok", "mode": _PAUSE_NAMES[mode]})

    async def resume(self, request: Request) -> Response:
        await self._engine.resume()
        return json_answer({"status": "ok"})

    async def abort(self, request: Request) -> Response:
        body = await body_of(request, EngineAbort)
        if body.rid is None and not body.abort_all:
            raise RequestRejected('aborting: the body names no request. Send {"rid": ...} or {"abort_all": true}.', param="rid")
        await self._engine.abort(None if body.abort_all else body.rid)
        return json_answer({"status": "ok"})

    async def stage(self, request: Request) -> Response:
        await self._engine.stage(await body_of(request, WeightManifest))
        return json_answer({"status": "ok"})

    async def commit(self, request: Request) -> Response:
        return json_answer(await self._engine.commit((await body_of(request, EngineCommit)).version))

    async def score(self, request: Request) -> Response:
        if self._scorer is None:
            raise NotSupported(f"scoring: engine {self._engine.name!r} only generates. Ask an embedded engine.")
        token_ids, row_offsets, temperature = decode_rows(await read_body(request.receive))
        scores = await with_client(request.receive, self._scorer.score(token_ids, row_offsets, temperature=temperature))
        return Response(encode_scores(scores), media_type=PACKED)

    async def health(self, request: Request) -> Response:
        """200 while the engine lives, 503 after; the numbers show progress."""
        return json_answer(await self._engine.health())

    async def model_info(self, request: Request) -> Response:
        version = (await self._engine.health()).version
        return json_answer(ModelInfo(self._engine.name, str(version), self._engine.capabilities))


async def _collect(chunks: AsyncIterator[Chunk], answer: Answer) -> Answer:
    async for chunk in chunks:
        answer.add(chunk)
    return answer


async def _events(chunks: AsyncGenerator[Chunk], answer: Answer) -> AsyncIterator[bytes]:
    """Server-sent events; closing it (the client left) aborts the request. An engine's end is an event too: the status is sent."""
    async with aclosing(chunks):
        try:
            yield _event(answer.body())
            async for chunk in chunks:
                answer.add(chunk)
                yield _event(answer.body())
        except MidflightError as error:
            yield _event(fault_of(error).body)
    yield b"data: [DONE]\n\n"


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
