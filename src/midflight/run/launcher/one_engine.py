"""Implements `midflight engine`: one process holds the gateway, one engine behind it, and the
routes that give this engine weights. This imports torch.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.websockets import WebSocket

from midflight.config.sections import Config
from midflight.engines.app import EngineCollector, EngineRoutes
from midflight.engines.relay import ServedEngine, relay, relay_steps
from midflight.engines.servers.engine import ServerEngine
from midflight.gateway.http.http import build_app
from midflight.observe.alarms import Alarms
from midflight.observe.observers import Observers
from midflight.observe.prometheus import Metrics
from midflight.ports import Scorer
from midflight.run.api.disk_weights import DiskWeights
from midflight.run.engine.companion import speak_for_server
from midflight.run.engine.engine_process import make_engine
from midflight.run.parts import serve_while
from midflight.run.rollout.serving import Serving
from midflight.run.scratch import remove_left, scratch_folder
from midflight.text.tokenizer import Tokenizer
from midflight.wire.edge import RequireToken
from midflight.wire.hosts import guarded
from midflight.wire.server import listen, serve_app

NAME = "engine"
E = TypeVar("E", bound=ServedEngine)


async def serve_engine(
    config: Config,
    model: Path,
    *,
    host: str,
    port: int,
    token: str | None,
    ready: Callable[[str], None],
    alarmed: Callable[[str], None],
) -> None:
    """Serves until it is cancelled, or until the engine dies: nothing is started again here.
    `ready` gets the URL, and `alarmed` gets the text of each alarm.

    If there is a token, every route except `/health` requires it.
    """
    remove_left()
    with listen(host, port) as listener:
        url = f"http://{host}:{listener.getsockname()[1]}"
        site = OneEngineSite(
            config, model, listener, url=url, token=token, ready=ready, alarmed=alarmed
        )
        if config.engine.kind == "embedded":
            engine = await asyncio.to_thread(make_engine, config, model, name=NAME, version=0)
            await serve_while(engine.run(), site.serve(engine, relay_steps, scorer=engine))
            return

        async def serve(engine: ServerEngine) -> None:
            await site.serve(engine, relay)

        url = config.engine.urls[0] if config.engine.urls else None
        with scratch_folder() as staging:
            await speak_for_server(
                config, model, serve, name=NAME, url=url, version=0, staging=staging
            )


class OneEngineSite:
    """The application that answers on the socket, once there is an engine."""

    def __init__(
        self,
        config: Config,
        model: Path,
        listener: socket.socket,
        *,
        url: str,
        token: str | None,
        ready: Callable[[str], None],
        alarmed: Callable[[str], None],
    ) -> None:
        self._config = config
        self._listener = listener
        self._url = url
        self._token = token
        self._ready = ready
        self._alarmed = alarmed
        self._tokenizer = Tokenizer.load(model)
        self._model = model

    async def serve(
        self,
        engine: E,
        wire: Callable[[E, WebSocket], Awaitable[None]],
        *,
        scorer: Scorer | None = None,
    ) -> None:
        """Waits for clients, for ever; ended by cancellation. When a client commits a version, the
        fleet serves it.
        """
        metrics = Metrics()
        metrics.registry.register(EngineCollector(engine.reading))
        alarms = Alarms(lambda alarm: self._alarmed(alarm.text))
        record = Observers([metrics.apply, alarms.apply]).apply
        serving = Serving(
            self._config, self._tokenizer, [engine], record=record, version=0, anonymous=True
        )
        serving.gateway.address = self._url
        routes = EngineRoutes(
            engine, wire, scorer=scorer, committed=partial(serving.fleet.served, engine.name)
        )
        app = build_app(
            serving.gateway,
            serving.control,
            ready=serving.routable,
            metrics=metrics.registry,
            extra_routes=[
                *routes.wire(),
                *routes.operator(),
                DiskWeights(self._model, serving.fleet, serving.handover).route(None),
            ],
        )
        app = guarded(app, host=self._listener.getsockname()[0], names=self._config.gateway.names)
        if self._token is not None:
            app = RequireToken(app, self._token)
        answers = serve_app(
            app,
            self._listener,
            ready=lambda: self._ready(self._url),
            stopping=serving.gateway.stop,
        )
        await serve_while(answers, serving.watch(), serving.rejoin.run())
