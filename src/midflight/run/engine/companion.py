"""The process beside a server of other people: it starts or attaches the server, and speaks for it
in our engines' wire.

It does not import torch, unless adapters are merged or weights come by broadcast.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from midflight.config.seats import BY_SERVER_ENGINE, by_server_engine
from midflight.config.sections import Config
from midflight.engines.app import build_app
from midflight.engines.introduction import about_route
from midflight.engines.relay import relay
from midflight.engines.servers.adapters import AdapterEngine
from midflight.engines.servers.direct import TRANSPORT as DIRECT
from midflight.engines.servers.direct import DirectLoader
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.server import Server
from midflight.engines.servers.sglang import SglangServer
from midflight.engines.servers.staged import write_first
from midflight.engines.servers.vllm import VllmServer
from midflight.errors import EngineError, EngineUnavailable, RunFailed
from midflight.models.sizes import num_choices_of, sizes_of
from midflight.run.device_lock import LockedSleeper, device_lock
from midflight.run.engine.server_process import adapters_kept, attached, recorded_experts, started
from midflight.run.heartbeat import ENDLESS
from midflight.run.parts import (
    EngineSpec,
    FirstWork,
    LauncherPipe,
    Notice,
    Ready,
    serve_while,
)
from midflight.run.scratch import remove_left, scratch_folder
from midflight.text.tokenizer import Tokenizer
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.select import receiver
from midflight.wire.server import serve_app

_log = logging.getLogger(__name__)


async def run_companion(spec: EngineSpec, launcher: LauncherPipe) -> None:
    """Runs until the launcher ends it, or the server that it started dies. Files that an earlier
    life of it left in memory are removed first.
    """
    remove_left()
    with (
        socket.socket(fileno=spec.socket_fd) as listener,
        scratch_folder(f"{spec.segment}-{spec.name}") as staging,
    ):

        async def serve(engine: ServerEngine) -> None:
            serve_client = partial(relay, worked=FirstWork(launcher))
            app = build_app(
                engine,
                serve_client,
                token=spec.token,
                sleeper=None if lock is None else LockedSleeper(engine, lock),
                beside=[about_route(engine, Path(spec.model))],
            )
            starting.close()
            await serve_app(app, listener, ready=lambda: launcher.tell(Ready()))

        config = Config.model_validate_json(spec.config)
        lock = device_lock(config, alone=False)
        if lock is not None:
            with launcher.heartbeat.doing("waits until the trainer has left its device"):
                await lock.take()
        with ExitStack() as starting:
            # without a limit: a server that stands still is found by `come_up`
            starting.enter_context(launcher.heartbeat.doing("starts its server", limit=ENDLESS))
            await speak_for_server(
                config,
                Path(spec.model),
                serve,
                name=spec.name,
                url=spec.url,
                version=spec.version,
                staging=staging,
                say=lambda text: launcher.tell(Notice(text)),
            )


async def speak_for_server(
    config: Config,
    model: Path,
    serve: Callable[[ServerEngine], Awaitable[None]],
    *,
    name: str,
    url: str | None,
    version: int,
    staging: Path,
    say: Callable[[str], None] = _log.warning,
) -> None:
    """Starts a server, or attaches to the one at `url`; then `serve` answers for it. It is ended by
    cancellation, or by the server's death.

    The model's files are read before anything is started. Until the server is attached, clients
    wait in the socket.
    """
    kept = adapters_kept(config, model)
    first = model if kept else await asyncio.to_thread(write_first, model, staging)
    tokenizer = Tokenizer.load(model)
    wire = _wire(config, model)
    if url is None:
        server = started(config, first, name=name, version=version)
    else:
        server = attached(config.engine, url, name=name)
    stage_seconds = config.weights.stage_seconds
    servers = config.engine.servers
    engine_class = AdapterEngine if kept else ServerEngine
    async with server as running:
        engine = engine_class(
            name,
            running.url,
            wire,
            tokenizer=tokenizer,
            model=model,
            receiver=receiver(stage_seconds=stage_seconds),
            staging=staging,
            version=version,
            num_workers=servers[0].world_size if servers else None,
            direct=DirectLoader(
                config.engine.kind,
                DirectFeed(answer_seconds=stage_seconds),
                by_own_engine=by_server_engine(config),
            ),
            start_seconds=config.engine.start_seconds,
            works=running.works,
        )

        async def serve_attached() -> None:
            caution = await engine.attached()
            if caution:
                say(caution)
            if by_server_engine(config):
                say(f"{name}: {BY_SERVER_ENGINE}")
            await serve(engine)

        await serve_while(running.died(), _run(engine), serve_attached())


async def _run(engine: ServerEngine) -> None:
    """Runs the engine. A server that we cannot work with will be no better after a restart, so that
    its error ends the run; one that does not answer may be.
    """
    try:
        await engine.run()
    except EngineUnavailable:
        raise
    except EngineError as error:
        raise RunFailed(str(error)) from error


def _wire(config: Config, model: Path) -> Server:
    engine = config.engine
    num_experts = recorded_experts(config, model)
    vocab_size = sizes_of(model).vocab_size
    num_adapters = adapters_kept(config, model)
    theirs = bool(engine.urls)
    if engine.kind == "vllm":
        return VllmServer(
            vocab_size=vocab_size,
            max_running=engine.max_running,
            num_experts=num_experts,
            num_adapters=num_adapters,
            theirs=theirs,
        )
    return SglangServer(
        vocab_size=vocab_size,
        max_running=engine.max_running,
        num_experts=num_experts,
        num_adapters=num_adapters,
        num_choices=num_choices_of(model),
        max_context=config.model.max_context,
        theirs=theirs,
        deterministic=engine.deterministic,
        direct=config.weights.transport == DIRECT and not by_server_engine(config),
    )
