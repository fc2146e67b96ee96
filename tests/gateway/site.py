"""A gateway over HTTP in memory and two scripted engines, with everything that can happen to them, on virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import httpx2

from midflight.engines.streams import ChunkStream
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.generation import Generator
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.fleet.health import HealthWatch
from midflight.gateway.http.control import Control
from midflight.gateway.http.http import build_app
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.types import Chunk, GenerateRequest, PauseMode
from midflight.types.facts import record_nothing
from midflight.wire.memory import MemoryTransport


class BringingEngine(ScriptedEngine):
    """One whose stream is that of an engine in another process: it brings its chunks itself."""

    def generate(self, request: GenerateRequest) -> ChunkStream:
        chunks = super().generate(request)
        feeding: list[asyncio.Task[None]] = []

        def opened(stream: ChunkStream) -> None:
            feeding.append(asyncio.create_task(fed(stream, chunks)))

        return ChunkStream(eager=request.eager, on_open=opened, on_close=lambda: [task.cancel() for task in feeding])


async def fed(stream: ChunkStream, chunks: AsyncIterator[Chunk]) -> None:
    try:
        async with aclosing(chunks):
            async for c in chunks:
                tops = c.top_logprobs or (None,) * len(c.token_ids)
                for token_id, logprob, top in zip(c.token_ids, c.logprobs, tops, strict=True):
                    stream.add(token_id, logprob, version=c.version, kv_version=c.kv_version, top=top)
                if c.finish is not None:
                    stream.end(c.version, c.finish, attested=c.attested)
    except Exception as error:
        stream.fail(error)


class Site:
    """A gateway over two scripted engines, of which one brings its chunks itself, and what can happen to them."""

    def __init__(self, engines: Sequence[ScriptedEngine] | None = None) -> None:
        self.engines = engines or [kind(f"e{k}", script=Script(mean_length=30)) for k, kind in enumerate((ScriptedEngine, BringingEngine))]
        self.fleet = Fleet()
        for engine in self.engines:
            self.fleet.attach(engine)
        generator = Generator(self.fleet, request_seconds=600)
        self.control = Control(self.fleet, generator)
        self.health = HealthWatch(self.fleet, interval_seconds=0.2, stall_seconds=1.0)
        self.gateway = Gateway(
            generator, scripted_tokenizer(), record_nothing, model="policy", limits=EngineLimits(4096, 262, features=CAPABLE.features)
        )
        self.gateway.address = "http://memory"

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx2.AsyncClient]:
        app = build_app(self.gateway, self.control)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self.health.run())
            async with httpx2.AsyncClient(transport=MemoryTransport(app, tasks), base_url="http://memory", timeout=None) as http:
                yield http
            watch.cancel()

    async def disturb(self, events: list[tuple[float, str, int]]) -> None:
        """(seconds since the last, what, which engine)."""
        for seconds, what, which in events:
            await asyncio.sleep(seconds)
            engine = self.engines[which]
            match what:
                case "abort":
                    if engine.name not in {s.name for s in self.fleet.states() if s.error}:
                        await engine.abort(None)
                case "restart":
                    engine.die()
                    await asyncio.sleep(0.05)
                    engine.revive()
                case "stall":
                    engine.stall()
                    await asyncio.sleep(1.5)
                    engine.unstall()
                case "nonsense":
                    engine.mangle = lambda chunk: [chunk.changed(logprobs=(math.nan,) * len(chunk.token_ids))]
                    await asyncio.sleep(0.05)
                    engine.mangle = None
                case mode:
                    await self.control.pause(PauseMode(mode.removeprefix("pause by ")))
                    await asyncio.sleep(0.3)
                    await self.control.resume()
