"""An engine over HTTP: the routes by which a rollout process uses it, and those by which an
operator gives it weights. `relay` is the engine's end of the multiplexed wire.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Generic, TypeVar, cast

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

from midflight.engines import wire
from midflight.engines.relay import ServedEngine, ignore_work
from midflight.errors import NotSupported, RequestRejected
from midflight.ports import PromptScorer, Scorer, Sleeper
from midflight.types import (
    Attestation,
    EngineHealth,
    Feature,
    MemoryPart,
    PauseMode,
    Version,
    WeightManifest,
)
from midflight.wire.edge import RequireToken, read_body, with_client
from midflight.wire.routes import PACKED, body_of, json_answer, metrics_route, route

E = TypeVar("E", bound=ServedEngine)


class EnginePause(msgspec.Struct, frozen=True):
    mode: PauseMode


class EngineWake(msgspec.Struct, frozen=True):
    part: MemoryPart


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
    sleeper: Sleeper | None = None,
    beside: Sequence[BaseRoute] = (),
    worked: Callable[[], None] = ignore_work,
) -> ASGIApp:
    """The application of an engine process. With a token, everything but `/health` needs it as
    bearer. See `EngineRoutes`.

    The caller starts the engine's `run`, if the engine has one. `beside` holds further routes, such
    as the one by which the engine describes itself. `worked` is called before scores are sent.
    `serve` has a `worked` of its own.
    """
    routes = EngineRoutes(engine, serve, scorer=scorer, sleeper=sleeper, worked=worked)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine.reading))
    served = list(routes.wire())
    served += beside
    served.append(routes.health("/health"))
    served.append(metrics_route(registry))
    app = Starlette(routes=served)
    return app if token is None else RequireToken(app, token)


class EngineRoutes(Generic[E]):
    """The routes of one engine."""

    def __init__(
        self,
        engine: E,
        serve: Callable[[E, WebSocket], Awaitable[None]],
        *,
        scorer: Scorer | None = None,
        sleeper: Sleeper | None = None,
        committed: Callable[[Version], None] = lambda version: None,
        worked: Callable[[], None] = ignore_work,
    ) -> None:
        """`serve` is the engine's end of the wire to one client, until the client leaves; `relay`
        works with any engine. `scorer` is the engine again, if it can score. `sleeper` puts it to
        sleep and wakes it, if it shares its device in turns. `committed` is called with each
        version that the engine has attested, and `worked` before scores are sent.
        """
        self._engine = engine
        self._serve = serve
        self._scorer = scorer
        self._sleeper = sleeper
        self._committed = committed
        self._worked = worked

    def wire(self) -> Sequence[BaseRoute]:
        """The routes that `RemoteEngine` uses."""
        verbs = {
            "pause": self._pause,
            "resume": self._resume,
            "sleep": self._sleep,
            "wake": self._wake,
            "abort": self._abort,
            "stage": self._stage,
            "commit": self._commit,
            "score": self._score,
            "prompt_logprobs": self._prompt_logprobs,
        }

        async def stream(socket: WebSocket) -> None:
            await self._serve(self._engine, socket)

        routes: list[BaseRoute] = []
        for name, verb in verbs.items():
            routes.append(route(f"{wire.PREFIX}/{name}", verb))
        routes.append(self.health(f"{wire.PREFIX}/health"))
        routes.append(WebSocketRoute(wire.STREAM_PATH, stream))
        return routes

    def operator(self) -> Sequence[BaseRoute]:
        """The routes for weight updates, for people who run one engine without a trainer."""
        return [
            route("/stage_weights", self._stage),
            route("/commit_weights", self._commit_for_operator),
        ]

    def health(self, path: str) -> BaseRoute:
        """A route that answers 200 while the engine lives, and 503 after. Its numbers show
        progress.
        """

        async def health(request: Request) -> Response:
            return json_answer(await self._engine.health())

        return route(path, health, method="GET")

    async def _pause(self, request: Request) -> Response:
        body = await body_of(request, EnginePause)
        await self._engine.pause(body.mode)
        return json_answer({"status": "ok"})

    async def _resume(self, request: Request) -> Response:
        await self._engine.resume()
        return json_answer({"status": "ok"})

    async def _sleep(self, request: Request) -> Response:
        await self._takes_turns().sleep()
        return json_answer({"status": "ok"})

    async def _wake(self, request: Request) -> Response:
        body = await body_of(request, EngineWake)
        await self._takes_turns().wake(body.part)
        return json_answer({"status": "ok"})

    def _takes_turns(self) -> Sleeper:
        if self._sleeper is None:
            raise NotSupported(
                f"putting engine {self._engine.name!r} to sleep: it keeps its memory. Start it "
                'with engine.share = "time".'
            )
        return self._sleeper

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
        return json_answer(await self._attested(request))

    async def _commit_for_operator(self, request: Request) -> Response:
        """Answers with what is served. The time that the swap took is for the gateway."""
        said = await self._attested(request)
        return json_answer({"version": said.version, "fingerprint": said.fingerprint})

    async def _attested(self, request: Request) -> Attestation:
        body = await body_of(request, EngineCommit)
        attestation = await self._engine.commit(body.version)
        self._committed(attestation.version)
        return attestation

    async def _score(self, request: Request) -> Response:
        if self._scorer is None:
            raise NotSupported(
                f"scoring: engine {self._engine.name!r} only generates. Ask an embedded engine."
            )
        body = await read_body(request.receive)
        token_ids, row_offsets, temperature = wire.decode_rows(body)
        scoring = self._scorer.score(token_ids, row_offsets, temperature=temperature)
        scores = await with_client(request.receive, scoring)
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
            "Output tokens since the engine started.",
            value=health.num_tokens,
        )
        yield CounterMetricFamily(
            "midflight_engine_computed_tokens",
            "Tokens that went through the model.",
            value=health.num_computed,
        )
        yield CounterMetricFamily(
            "midflight_engine_reused_tokens",
            "Tokens of prompts whose keys were there.",
            value=health.num_reused,
        )
        yield GaugeMetricFamily(
            "midflight_engine_running_requests",
            "Requests decoded together.",
            value=health.num_running,
        )
        yield GaugeMetricFamily(
            "midflight_engine_waiting_requests",
            "Requests waiting for a slot.",
            value=health.num_waiting,
        )
        yield GaugeMetricFamily(
            "midflight_engine_weight_version",
            "Version of the weights served.",
            value=health.version,
        )
        yield GaugeMetricFamily(
            "midflight_engine_paused", "1 while paused.", value=float(health.paused)
        )
