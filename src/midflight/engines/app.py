"""An engine over HTTP: SGLang's control plane in JSON, and the multiplexed wire for gateways."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from midflight.engines.generate_body import Answer, GenerateBody, read_request
from midflight.engines.metrics import EngineCollector
from midflight.engines.relay import ServedEngine
from midflight.engines.wire import SCORE_PATH, STREAM_PATH, decode_rows, encode_scores
from midflight.errors import Blame, MidflightError, NotSupported, RequestRejected, Unauthorized
from midflight.ports import Scorer
from midflight.types import Capabilities, Chunk, PauseMode, WeightManifest

R = TypeVar("R")
E = TypeVar("E", bound=ServedEngine)
_PAUSE_NAMES = {**{mode.value: mode for mode in PauseMode}, "in_place": PauseMode.KEEP, "retract": PauseMode.RECOMPUTE}
_CLIENT_GONE = 499
"""Nobody reads this status: the client has left."""


class PauseBody(msgspec.Struct, frozen=True):
    mode: str = PauseMode.ABORT.value


class AbortBody(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class CommitBody(msgspec.Struct, frozen=True):
    version: int


class ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str
    capabilities: Capabilities


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def build_app(engine: E, serve: Callable[[E, WebSocket], Awaitable[None]], *, token: str | None, scorer: Scorer | None = None) -> Starlette:
    """The ASGI application. `serve` is the engine's end of the wire to one client, until that leaves: `relay` does for any engine.

    With a token, everything but `/health` needs it as bearer. The engine's `run`, if it has one, is the caller's to start.
    `scorer` is the engine again, where it can score.
    """

    async def stream(socket: WebSocket) -> None:
        await serve(engine, socket)

    app = Starlette(
        routes=[*_Endpoints(engine, scorer).routes(), WebSocketRoute(STREAM_PATH, stream)],
        exception_handlers={MidflightError: _error_answer},
    )
    if token is not None:
        app.add_middleware(_RequireToken, token=token)
    return app


class _Endpoints:
    def __init__(self, engine: ServedEngine, scorer: Scorer | None) -> None:
        self._engine, self._scorer = engine, scorer
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine.reading))

    def routes(self) -> list[Route]:
        posts = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/stage_weights": self.stage,
            "/commit_weights": self.commit,
            SCORE_PATH: self.score,
        }
        gets = {"/health": self.health, "/model_info": self.model_info, "/metrics": self.metrics}
        return [Route(p, e, methods=["POST"]) for p, e in posts.items()] + [Route(p, e, methods=["GET"]) for p, e in gets.items()]

    async def generate(self, request: Request) -> Response:
        body = _read(await request.body(), GenerateBody)
        asked = read_request(body, self._engine.tokenizer)
        answer = Answer(asked, self._engine.tokenizer, logprobs=body.return_logprob)
        chunks = self._engine.generate(asked)
        # The first chunk is awaited here, so that a refusal has its own status also where the answer streams.
        first = await _unless_gone(request, anext(chunks))
        if first is None:
            await chunks.aclose()
            return Response(status_code=_CLIENT_GONE)
        answer.add(first)
        if body.stream:
            return StreamingResponse(_events(chunks, answer), media_type="text/event-stream")
        finished = await _unless_gone(request, _collect(chunks, answer))
        return Response(status_code=_CLIENT_GONE) if finished is None else _json(finished.body())

    async def pause(self, request: Request) -> Response:
        mode = _read(await request.body(), PauseBody).mode
        if mode not in _PAUSE_NAMES:
            raise RequestRejected(f"pausing: mode is {mode!r}. Send one of {', '.join(sorted(_PAUSE_NAMES))}.", param="mode")
        await self._engine.pause(_PAUSE_NAMES[mode])
        return _json({"status": "ok", "mode": _PAUSE_NAMES[mode]})

    async def resume(self, request: Request) -> Response:
        await self._engine.resume()
        return _json({"status": "ok"})

    async def abort(self, request: Request) -> Response:
        body = _read(await request.body(), AbortBody)
        if body.rid is None and not body.abort_all:
            raise RequestRejected('aborting: the body names no request. Send {"rid": ...} or {"abort_all": true}.', param="rid")
        await self._engine.abort(None if body.abort_all else body.rid)
        return _json({"status": "ok"})

    async def stage(self, request: Request) -> Response:
        await self._engine.stage(_read(await request.body(), WeightManifest))
        return _json({"status": "ok"})

    async def commit(self, request: Request) -> Response:
        return _json(await self._engine.commit(_read(await request.body(), CommitBody).version))

    async def score(self, request: Request) -> Response:
        if self._scorer is None:
            raise NotSupported(f"scoring: engine {self._engine.name!r} only generates. Ask an embedded engine.")
        token_ids, row_offsets, temperature = decode_rows(await request.body())
        scores = await _unless_gone(request, self._scorer.score(token_ids, row_offsets, temperature=temperature))
        if scores is None:
            return Response(status_code=_CLIENT_GONE)
        return Response(encode_scores(scores), media_type="application/octet-stream")

    async def health(self, request: Request) -> Response:
        """200 while the engine lives, 503 after; the numbers show progress."""
        return _json(await self._engine.health())

    async def model_info(self, request: Request) -> Response:
        version = (await self._engine.health()).version
        return _json(ModelInfo(self._engine.name, str(version), self._engine.capabilities))

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


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
            yield _event(_error_body(error))
    yield b"data: [DONE]\n\n"


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable[R]) -> R | None:
    """Waits for the work, which is cancelled (result `None`) when the client leaves first."""

    async def do() -> R:
        return await work

    async with asyncio.TaskGroup() as tasks:
        doing, leaving = tasks.create_task(_outcome(do())), tasks.create_task(_left(request))
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        doing.cancel()
        leaving.cancel()
    if doing.cancelled():
        return None
    result, error = doing.result()
    if error is not None:
        raise error
    return result


async def _outcome(work: Coroutine[Any, Any, R]) -> tuple[R | None, MidflightError | None]:
    """Result or refusal, as values: a task group would wrap the error."""
    try:
        return await work, None
    except MidflightError as error:
        return None, error


async def _left(request: Request) -> None:
    """Waits for the client's disconnection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _RequireToken:
    """Refuses what lacks the bearer token, except `/health`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
        if scope.get("path") == "/health" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocket(scope, receive, send).close(code=1008)
        else:
            error = Unauthorized("the engine needs a token that this request lacks. Send it as 'Authorization: Bearer <token>'.")
            await _error_response(error)(scope, receive, send)


async def _error_answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, MidflightError)
    return _error_response(error)


def _error_response(error: MidflightError) -> Response:
    return _json(_error_body(error), status=error.status)


def _error_body(error: MidflightError) -> ErrorBody:
    """OpenAI's error shape."""
    kind = "invalid_request_error" if error.blame is Blame.REQUEST else "server_error"
    param = error.param if isinstance(error, RequestRejected) else None
    return ErrorBody(ErrorDetail(str(error), kind, param, error.code))


def _read(body: bytes, kind: type[R]) -> R:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRejected(f"reading the body: {error}. Send the JSON object that this path documents.") from error


def _json(value: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
