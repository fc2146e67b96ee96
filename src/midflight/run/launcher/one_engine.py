"""Implements `midflight engine`: one process holds the gateway, one engine behind it, and the
routes that give this engine weights. This imports torch for an engine of ours.
"""

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.websockets import WebSocket

from midflight.config.sections import Config
from midflight.engines.app import EngineCollector, EngineRoutes
from midflight.engines.relay import ServedEngine
from midflight.gateway.http.http import build_app
from midflight.observe.alarms import Alarms
from midflight.observe.observers import Observers
from midflight.observe.prometheus import Metrics
from midflight.ports import Scorer
from midflight.run.api.disk_weights import DiskWeights
from midflight.run.engine.single_engine import run_single_engine
from midflight.run.parts import serve_while
from midflight.run.rollout.serving import Serving
from midflight.run.scratch import remove_left
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
        tokenizer = Tokenizer.load(model)
        site = OneEngineSite(config, model, tokenizer, listener, url, token, ready, alarmed)
        await run_single_engine(config, model, site.serve, name=NAME)


@dataclass(frozen=True, slots=True)
class OneEngineSite:
    """The application that answers on the socket, once there is an engine."""

    config: Config
    model: Path
    tokenizer: Tokenizer
    listener: socket.socket
    url: str
    token: str | None
    ready: Callable[[str], None]
    alarmed: Callable[[str], None]

    async def serve(
        self,
        engine: E,
        wire: Callable[[E, WebSocket], Awaitable[None]],
        scorer: Scorer | None = None,
    ) -> None:
        """Waits for clients, for ever; ended by cancellation. When a client commits a version, the
        fleet serves it.
        """
        metrics = Metrics()
        metrics.registry.register(EngineCollector(engine.reading))
        alarms = Alarms(lambda alarm: self.alarmed(alarm.text))
        record = Observers([metrics.apply, alarms.apply]).apply
        serving = Serving(
            self.config, self.tokenizer, [engine], record=record, version=0, anonymous=True
        )
        serving.gateway.address = self.url
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
                DiskWeights(self.model, serving.fleet, serving.handover).route(None),
            ],
        )
        app = guarded(app, host=self.listener.getsockname()[0], names=self.config.gateway.names)
        if self.token is not None:
            app = RequireToken(app, self.token)
        answers = serve_app(
            app,
            self.listener,
            ready=lambda: self.ready(self.url),
            stopping=serving.gateway.stop,
        )
        await serve_while(answers, serving.watch(), serving.rejoin.run())
