"""The server beside a companion: it is started here, or was started outside the run, and answers.

| wait | waits for | ended by |
|---|---|---|
| `started`, `attached` | the server's first answer | the end of one that was started here, or a deadline |
| `StartedServer.died` | the server's end | it, or cancellation |
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn

import aiohttp

from midflight.config.derived import engine_python, served_dtype
from midflight.config.engine import EngineSection
from midflight.config.seats import by_server_engine
from midflight.config.sections import Config
from midflight.engines.servers.command import HOST, READY, Command, ServedModel, server_command
from midflight.errors import ConfigError, RunFailed, first_error
from midflight.models.adapters import adapter_of
from midflight.models.sizes import num_experts_of, reads_more_than_text, sizes_of
from midflight.observe.activity import ActivityProbe, ProcessActivity
from midflight.run.parts import ServerLost, serve_while
from midflight.run.places.port import KILLS, stop_all
from midflight.run.places.process import LocalProcess

POLL_SECONDS = 0.25
"""The time between two looks whether a server answers. There is no other sign of its start, which
takes half a minute or more.
"""
ANSWER_SECONDS = 2.0
"""The time for the answer to the first look. Each look has twice as long as the one before, because
a busy server answers late.
"""
LOOK_SECONDS = 1.0
"""The time between two looks whether a server that comes up moves."""
STOP_SECONDS = 1.5
"""The time between asking a server to end and killing it. It is less than the companion has for its
own end. A server keeps nothing worth a wait.
"""


def adapters_kept(config: Config, model: Path) -> int:
    """The number of versions that a server keeps side by side, if they are adapters and are not
    merged; else 0.
    """
    if config.lora.merged or adapter_of(model) is None:
        return 0
    return config.rollout.max_staleness + 2


def recorded_experts(config: Config, model: Path) -> int:
    """The number of experts in a layer of the model, if the chosen experts are to be recorded; else
    0.
    """
    return num_experts_of(model) if config.correction.routing_replay else 0


def interpreter(engine: EngineSection) -> Path:
    """The interpreter of the server's environment; raises `ConfigError` if it is not there. The
    path is not resolved: in a virtual environment it is a link.
    """
    path = engine_python(engine).absolute()
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"starting {engine.kind}: there is no interpreter {path}; run `make engines`, which "
            "installs vLLM and SGLang, or set engine.python to that of an environment that has it."
        )
    return path


def check_interpreter(engine: EngineSection) -> None:
    """Checks the interpreter before anything is started. Embedded engines and servers that run
    already need none.
    """
    if engine.kind != "embedded" and not engine.urls:
        interpreter(engine)


def command_for(
    config: Config, model: Path, *, version: int, port: int, inherited: Mapping[str, str]
) -> Command:
    dtype = served_dtype(config)
    adapter = adapter_of(model)
    served = ServedModel(
        folder=model.absolute(),
        name=config.model.name,
        dtype=dtype,
        max_context=config.model.max_context,
        kv_bytes_per_token=sizes_of(model).kv_bytes_per_token(dtype),
        version=version,
        num_adapters=adapters_kept(config, model),
        rank=adapter.rank if adapter else 0,
        targets=adapter.targets if adapter else (),
        records_experts=recorded_experts(config, model) > 0,
        own_transfer=by_server_engine(config),
        has_other_towers=reads_more_than_text(model),
    )
    return server_command(
        config.engine, served, python=interpreter(config.engine), port=port, inherited=inherited
    )


def reserve_port() -> socket.socket:
    """A bound socket that does not listen. While it is open no program is given its port by chance,
    and a server that asks for the port gets it.
    """
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((HOST, 0))
    return made


class AttachedServer:
    """A server that is started and ended outside the run: only its answers show whether it lives."""

    works = None
    """Its process cannot be seen."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def died(self) -> NoReturn:
        """Waits for ever; ended by cancellation."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


@asynccontextmanager
async def attached(engine: EngineSection, url: str, *, name: str) -> AsyncGenerator[AttachedServer]:
    """A server at `url` that answers. Waits up to `engine.start_seconds`, because the server may
    just have been started.
    """
    at = url.rstrip("/")
    try:
        async with asyncio.timeout(engine.start_seconds):
            await answering(at + READY[engine.kind])
    except TimeoutError as error:
        raise RunFailed(
            f"attaching {name}: no {engine.kind} server answered at {at}{READY[engine.kind]} "
            f"within {engine.start_seconds:g} s; start it, or mend engine.urls."
        ) from error
    yield AttachedServer(at)


@asynccontextmanager
async def started(
    config: Config, model: Path, *, name: str, version: int
) -> AsyncGenerator[StartedServer]:
    """A server that is started here, and answers. It ends with the block, or with this process.
    `RunFailed` has the end of its log when it does not come up.
    """
    log = Path(config.run.folder) / "logs" / f"{name}.server.log"
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        server = StartedServer(name, f"http://{HOST}:{port}", log=log)
        command = command_for(config, model, version=version, port=port, inherited=os.environ)
        await server.launch(command.argv, environ=command.environ, seconds=STOP_SECONDS)
        try:
            await server.come_up(READY[config.engine.kind], seconds=config.engine.start_seconds)
            yield server
        finally:
            # its process alone, because servers end their own children in order
            await stop_all([server], seconds=STOP_SECONDS)


class StandsStill(Exception):
    """A process that should move does not."""


class StartedServer(LocalProcess):
    """The server's process, and its address."""

    def __init__(self, engine: str, url: str, *, log: Path) -> None:
        super().__init__(f"{engine}'s server", log=log)
        self.url = url

    def works(self) -> ActivityProbe:
        """Watches the server for one wait of `ServerClient`."""
        return ActivityProbe(self.pid)

    async def come_up(self, path: str, *, seconds: float) -> None:
        """Waits until it answers 200 at `path`, while it and its children move. Its death is
        `RunFailed`, because it would die again. It is `ServerLost` if the server was killed, or
        does nothing for `seconds`.
        """
        try:
            await serve_while(
                answering(self.url + path), self.died(), self._standing_still(seconds)
            )
        except BaseExceptionGroup as errors:
            first = first_error(errors)
            if isinstance(first, StandsStill):
                raise ServerLost(
                    f"starting {self.name}: no answer from {self.url}{path}, and it {first}; raise "
                    "engine.start_seconds, or look at the end of "
                    f"{self.log}:\n{self.last_lines()}"
                ) from errors
            if isinstance(first, ServerLost) and first.was_killed:
                raise first from errors
            raise RunFailed(f"starting {self.name}: {first}") from errors

    async def _standing_still(self, seconds: float) -> NoReturn:
        """Waits until it has done nothing for so long: `StandsStill`. It is ended by
        cancellation.
        """
        motion = ProcessActivity(self.pid)
        while (still := motion.look()) < seconds:  # noqa: ASYNC110 (nothing tells of a process that does nothing)
            await asyncio.sleep(min(LOOK_SECONDS, seconds / 4))
        raise StandsStill(f"took no processor time, read and wrote nothing for {still:.0f} s")

    async def died(self) -> NoReturn:
        """Waits for an end that was not asked for: `ServerLost`."""
        status = await self.ended()
        lost = ServerLost(self.how_ended(status))
        lost.was_killed = status in KILLS
        raise lost


async def answering(url: str) -> None:
    """Waits until a GET of `url` is answered 200; the caller sets the deadline. Raises `RunFailed`
    if something else listens there.
    """
    seconds = ANSWER_SECONDS
    async with aiohttp.ClientSession() as session:
        while not await _answers(session, url, seconds=seconds):
            seconds *= 2
            await asyncio.sleep(POLL_SECONDS)


async def _answers(session: aiohttp.ClientSession, url: str, *, seconds: float) -> bool:
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.get(
            url, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=seconds)
        ) as answer:
            if 300 <= answer.status < 500:
                raise RunFailed(
                    f"{url} is answered with status {answer.status}: another program listens "
                    "there; mend engine.urls or engine.kind."
                )
            return answer.status == 200
    return False
