"""The port's contract in process and over the wire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.engines.contract import EngineContract
from tests.engines.models import MemoryReceiver, StepLog, make_engine

from midflight.engines.embedded.app import build_app
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.remote import RemoteEngine
from midflight.ports import Engine
from midflight.run.http_server import serve_app
from midflight.run.ring import listen


@asynccontextmanager
async def running(engine: EmbeddedEngine) -> AsyncIterator[EmbeddedEngine]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(engine.run())
        try:
            yield engine
        finally:
            task.cancel()


@asynccontextmanager
async def served(engine: EmbeddedEngine, *, token: str | None = "secret", port: int = 0) -> AsyncIterator[str]:
    """The engine's URL."""
    ready = asyncio.Event()
    with listen("127.0.0.1", port) as listener:
        async with running(engine), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(serve_app(build_app(engine, token=token), listener, ready=ready.set))
            try:
                await ready.wait()
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                task.cancel()


@asynccontextmanager
async def attached(url: str, observer: StepLog | None = None) -> AsyncIterator[RemoteEngine]:
    remote = RemoteEngine("remote", url, token="secret", observer=observer or StepLog())  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(remote.run())
        try:
            await remote.connect(seconds=5)
            yield remote
        finally:
            task.cancel()


class TestInProcess(EngineContract):
    @asynccontextmanager
    async def attached(self) -> AsyncIterator[tuple[Engine, MemoryReceiver]]:
        receiver = MemoryReceiver()
        async with running(make_engine(receiver=receiver)) as engine:
            yield engine, receiver


class TestRemote(EngineContract):
    @asynccontextmanager
    async def attached(self) -> AsyncIterator[tuple[Engine, MemoryReceiver]]:
        receiver = MemoryReceiver()
        async with served(make_engine(receiver=receiver)) as url, attached(url) as engine:
            yield engine, receiver
