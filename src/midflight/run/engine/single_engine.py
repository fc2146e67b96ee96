"""One engine in a process that has no launcher, as that of `midflight engine` or `midflight join`."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from midflight.config.sections import Config
from midflight.engines.relay import relay, relay_steps
from midflight.engines.servers.engine import ServerEngine
from midflight.run.engine.companion import speak_for_server
from midflight.run.parts import serve_while
from midflight.run.scratch import scratch_folder


async def run_single_engine(
    config: Config, model: Path, serve: Callable[..., Coroutine[Any, Any, None]], *, name: str
) -> None:
    """Makes the engine, or starts its server or attaches to it. `serve` then answers for it: it gets
    the engine, the relay for one client, and the engine once more if that scores.

    Runs until it is cancelled, or until the engine dies: nothing is started again here.
    """
    if config.engine.kind == "embedded":
        # it imports torch
        from midflight.run.engine.engine_process import make_engine

        engine = await asyncio.to_thread(make_engine, config, model, name=name, version=0)
        await serve_while(engine.run(), serve(engine, relay_steps, engine))
        return

    async def speak(engine: ServerEngine) -> None:
        await serve(engine, relay)

    url = config.engine.urls[0] if config.engine.urls else None
    with scratch_folder() as staging:
        await speak_for_server(config, model, speak, name=name, url=url, version=0, staging=staging)
