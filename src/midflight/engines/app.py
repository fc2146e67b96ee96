"""An engine over HTTP: the routes by which a rollout process uses it, and those by which an operator gives it weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from midflight.engines.relay import ServedEngine
from midflight.engines.wire import PREFIX, STREAM_PATH, decode_rows, encode_scores
from midflight.errors import NotSupported, RequestRejected
from midflight.ports import Scorer
from midflight.types import Capabilities, EngineHealth, PauseMode, Version, WeightManifest
from midflight.wire.edge import PACKED, RequireToken, body_of, json_answer, metrics_route, read_body, route, with_client

E = TypeVar("E", bound=ServedEngine)


class EnginePause(msgspec.Struct, frozen=True):
    mode: PauseMode


class EngineAbort(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class EngineCommit(msgspec.Struct, frozen=True):
    version: Version


class ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str
    capabilities: Capabilities


def build_app(engine: E, serve: Callable[[E, WebSocket], Awaitable[None]], *, token: str | None, scorer: Scorer | None = None) -> ASGIApp:
    """The application of an engine process. With a token, everything but `/health` needs it as bearer. See `EngineRoutes`.

    The engine's `run`, if it has one, is the caller's to start.
    """
    routes = EngineRoutes(engine, serve, scorer=scorer)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine.reading))
    app = Starlette(routes=[*routes.wire(), routes.health("/health"), metrics_route(registry)])
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
    ) -> None:
        """`serve` is the engine's end of the wire to one client, until that leaves: `relay` does for any engine.
        `scorer` is the engine again, where it can score. `committed` is told each version that the engine has attested."""
        self._engine, self._serve, self._scorer, self._committed = engine, serve, scorer, committed

    def wire(self) -> Sequence[BaseRoute]:
        """What `RemoteEngine` asks."""
        verbs = {
            "pause": self._pause,
            "resume": self._resume,
            "abort": self._abort,
            "stage": self._stage,
            "commit": self._commit,
            "score": self._score,
        }

        async def stream(socket: WebSocket) -> None:
            await self._serve(self._engine, socket)

        routes = [route(f"{PREFIX}/{name}", verb) for name, verb in verbs.items()]
        return [*routes, self.health(f"{PREFIX}/health"), WebSocketRoute(STREAM_PATH, stream)]

    def operator(self) -> Sequence[BaseRoute]:
        """Weight updates and what is served, for whoever runs one engine without a trainer."""
        return [
            route("/stage_weights", self._stage),
            route("/commit_weights", self._commit),
            route("/model_info", self._model_info, method="GET"),
        ]

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
            raise RequestRejected('aborting: the body names no request. Send {"rid": ...} or {"abort_all": true}.', param="rid")
        await self._engine.abort(None if body.abort_all else body.rid)
        return json_answer({"status": "ok"})

    async def _stage(self, request: Request) -> Response:
        await self._engine.stage(await body_of(request, WeightManifest))
        return json_answer({"status": "ok"})

    async def _commit(self, request: Request) -> Response:
        attestation = await self._engine.commit((await body_of(request, EngineCommit)).version)
        self._committed(attestation.version)
        return json_answer(attestation)

    async def _score(self, request: Request) -> Response:
        if self._scorer is None:
            raise NotSupported(f"scoring: engine {self._engine.name!r} only generates. Ask an embedded engine.")
        token_ids, row_offsets, temperature = decode_rows(await read_body(request.receive))
        scores = await with_client(request.receive, self._scorer.score(token_ids, row_offsets, temperature=temperature))
        return Response(encode_scores(scores), media_type=PACKED)

    async def _model_info(self, request: Request) -> Response:
        version = (await self._engine.health()).version
        return json_answer(ModelInfo(self._engine.name, str(version), self._engine.capabilities))


class EngineCollector(Collector):
    """The engine's numbers for Prometheus, read when they are scraped."""

    def __init__(self, reading: Callable[[], EngineHealth]) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        health = self._reading()
        yield CounterMetricFamily("midflight_engine_output_tokens", "Output tokens since the engine started", value=health.num_tokens)
        yield GaugeMetricFamily("midflight_engine_running_requests", "Requests decoded together", value=health.num_running)
        yield GaugeMetricFamily("midflight_engine_waiting_requests", "Requests waiting for a slot", value=health.num_waiting)
        yield GaugeMetricFamily("midflight_engine_weight_version", "Version of the weights served", value=health.version)
        yield GaugeMetricFamily("midflight_engine_paused", "1 while paused", value=float(health.paused))
