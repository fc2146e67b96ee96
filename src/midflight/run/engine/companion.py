"""The process beside a server of other people: it starts or attaches the server and speaks for it, in our engines' wire.

Torch-free, but where adapters are merged or weights come by broadcast.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from starlette.types import ASGIApp

from midflight.config.sections import Config
from midflight.engines.app import build_app
from midflight.engines.relay import relay
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.server import Server
from midflight.engines.servers.sglang import SglangServer
from midflight.engines.servers.staged import write_first
from midflight.engines.servers.vllm import VllmServer
from midflight.errors import EngineError, EngineUnavailable, RunFailed
from midflight.models.sizes import sizes_of
from midflight.run.engine.server_process import Attached, StartedServer, attached, started
from midflight.run.messages import EngineSpec, Launcher, Ready
from midflight.run.parts import serve_while
from midflight.text.tokenizer import Tokenizer
from midflight.weights.transports.select import receiver
from midflight.weights.transports.stale import SHARED
from midflight.wire.server import listen, serve_app


async def run_companion(spec: EngineSpec, launcher: Launcher) -> None:
    """Until the launcher ends it, or the server it started dies."""
    config, model = Config.model_validate_json(spec.config), Path(spec.model)
    first = await asyncio.to_thread(write_first, model, Path(spec.staging))
    if spec.url is None:
        server = started(config, first, name=spec.name, version=spec.version)
    else:
        server = attached(config.engine, spec.url, name=spec.name)
    engine_of = _engine_maker(config, model, name=spec.name, version=spec.version, staging=Path(spec.staging))
    with socket.socket(fileno=spec.socket_fd) as listener:
        await _speak_for(server, engine_of, listener, token=spec.token, ready=lambda: launcher.tell(Ready()))


async def serve_server(config: Config, model: Path, *, host: str, port: int, token: str | None, ready: Callable[[str], None]) -> None:
    """One server and its companion on their own, for `midflight engine`; `ready` gets our URL. Ended by cancellation, or its death."""
    name, urls = "engine", config.engine.urls
    memory = SHARED if SHARED.is_dir() else None
    with listen(host, port) as listener, tempfile.TemporaryDirectory(prefix="midflight-", dir=memory) as staging:
        first = await asyncio.to_thread(write_first, model, Path(staging))
        server = attached(config.engine, urls[0], name=name) if urls else started(config, first, name=name, version=0)
        url = f"http://{host}:{listener.getsockname()[1]}"
        engine_of = _engine_maker(config, model, name=name, version=0, staging=Path(staging))
        await _speak_for(server, engine_of, listener, token=token, ready=lambda: ready(url))


async def _speak_for(
    server: AbstractAsyncContextManager[Attached | StartedServer],
    engine_of: Callable[[str], ServerEngine],
    listener: socket.socket,
    *,
    token: str | None,
    ready: Callable[[], None],
) -> None:
    async with server as running:
        engine = engine_of(running.url)
        app = build_app(engine, relay, token=token)
        await serve_while(running.died(), _run(engine), _serve_attached(engine, app, listener, ready))


async def _run(engine: ServerEngine) -> None:
    """A server that we cannot work with will be no better after a restart; one that does not answer may be."""
    try:
        await engine.run()
    except EngineUnavailable:
        raise
    except EngineError as error:
        raise RunFailed(str(error)) from error


async def _serve_attached(engine: ServerEngine, app: ASGIApp, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Until then, whoever connects waits in the socket."""
    await engine.attached()
    await serve_app(app, listener, ready=ready)


def _engine_maker(config: Config, model: Path, *, name: str, version: int, staging: Path) -> Callable[[str], ServerEngine]:
    """Makes the adapter once the server's address is known; what it needs of the model is read before anything is started."""
    tokenizer = Tokenizer.load(model)
    server = _wire(config, vocab_size=sizes_of(model).vocab_size)

    def make(url: str) -> ServerEngine:
        return ServerEngine(name, url, server, tokenizer=tokenizer, model=model, receiver=receiver(), staging=staging, version=version)

    return make


def _wire(config: Config, *, vocab_size: int) -> Server:
    if config.engine.kind == "vllm":
        return VllmServer(vocab_size=vocab_size, max_running=config.engine.max_running)
    return SglangServer(vocab_size=vocab_size, max_running=config.engine.max_running, max_context=config.model.max_context)
