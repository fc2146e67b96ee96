"""The port's contract in process, over the wire, and over the wire of any engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.applications import Starlette
from tests.engines.contract import EngineContract
from tests.engines.models import MemoryReceiver, make_engine
from tests.engines.sites import ModelSite, ScriptedSite, Site, tiny_version

from midflight.engines.app import build_app
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.relay import relay, relay_steps
from midflight.engines.remote import RemoteEngine
from midflight.testing.script import Script
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.types.facts import Record, record_nothing
from midflight.wire.server import listen, serve_app


@asynccontextmanager
async def running(engine: EmbeddedEngine) -> AsyncIterator[EmbeddedEngine]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(engine.run())
        try:
            yield engine
        finally:
            task.cancel()


@asynccontextmanager
async def listening(app: Starlette, *, port: int = 0) -> AsyncIterator[str]:
    """The application's URL."""
    ready = asyncio.Event()
    with listen("127.0.0.1", port) as listener:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(serve_app(app, listener, ready=ready.set))
            try:
                await ready.wait()
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                task.cancel()


@asynccontextmanager
async def served(engine: EmbeddedEngine, *, token: str | None = "secret", port: int = 0) -> AsyncIterator[str]:
    """The engine's URL."""
    async with running(engine), listening(build_app(engine, relay_steps, token=token), port=port) as url:
        yield url


@asynccontextmanager
async def attached(url: str, record: Record = record_nothing) -> AsyncIterator[RemoteEngine]:
    remote = RemoteEngine("remote", url, token="secret", record=record)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(remote.run())
        try:
            await remote.connect(seconds=5)
            yield remote
        finally:
            task.cancel()


class TestInProcess(EngineContract):
    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Site]:
        receiver = MemoryReceiver()
        async with running(make_engine(receiver=receiver)) as engine:
            yield ModelSite(engine, receiver, tiny_version)


class TestRemote(EngineContract):
    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Site]:
        receiver = MemoryReceiver()
        async with served(make_engine(receiver=receiver)) as url, attached(url) as engine:
            yield ModelSite(engine, receiver, tiny_version)


class TestRelayed(EngineContract):
    """The embedded engine as any other: only its port is used."""

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Site]:
        receiver = MemoryReceiver()
        engine = make_engine(receiver=receiver)
        async with running(engine), listening(build_app(engine, relay, token="secret")) as url, attached(url) as remote:
            yield ModelSite(remote, receiver, tiny_version)


class TestScripted(EngineContract):
    """The fake that ships: what is tested on it holds for engines because it obeys what they obey."""

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Site]:
        script = Script(mean_length=None, by_version=True)
        can = replace(CAPABLE, max_running=16, features=frozenset(), max_context=64)
        yield ScriptedSite(ScriptedEngine(script=script, capabilities=can, step_seconds=0.002))
