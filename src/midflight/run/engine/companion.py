"""The process beside a server of other people: it starts or attaches the server, and speaks for it
in our engines' wire.

| wait | waits for | ended by |
|---|---|---|
| `started`, `attached` | the server's first answer | the end of one that was started here, or a deadline |
| `StartedServer.died` | the server's end | it, or cancellation |

Torch-free, but where adapters are merged or weights come by broadcast.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import aiohttp

from midflight.config.derived import engine_python, served_dtype
from midflight.config.sections import Config, EngineSection
from midflight.engines.about import about_route
from midflight.engines.app import build_app
from midflight.engines.relay import relay
from midflight.engines.servers.adapters import AdapterEngine
from midflight.engines.servers.command import HOST, READY, Command, Served, server_command
from midflight.engines.servers.direct import TRANSPORT as DIRECT
from midflight.engines.servers.direct import DirectWay
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.server import Server
from midflight.engines.servers.sglang import SglangServer
from midflight.engines.servers.staged import write_first
from midflight.engines.servers.vllm import VllmServer
from midflight.errors import ConfigError, EngineError, EngineUnavailable, RunFailed, first_error
from midflight.models.sizes import (
    adapter_of,
    num_choices_of,
    num_experts_of,
    reads_more_than_text,
    sizes_of,
)
from midflight.observe.motion import Motion, WorkedSince
from midflight.run.guard import guarded
from midflight.run.heart import ENDLESS
from midflight.run.parts import (
    EngineSpec,
    FirstWork,
    Launcher,
    Ready,
    ServerLost,
    Words,
    serve_while,
)
from midflight.run.places.port import KILLS
from midflight.run.scratch import remove_left, scratch_folder
from midflight.text.tokenizer import Tokenizer
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.select import receiver
from midflight.wire.server import serve_app

_log = logging.getLogger(__name__)
POLL_SECONDS = 0.25
"""Between two looks at whether a server answers: it tells nobody else, and takes half a minute or
more.
"""
ANSWER_SECONDS = 2.0
"""For the answer to the first look; each has twice as long as the one before, because a busy server
answers late.
"""
LOOK_SECONDS = 1.0
"""Between two looks at whether a server that comes up moves."""
STOP_SECONDS = 1.5
"""Between asking a server to end and killing it: less than the companion has for its own end. A
server keeps nothing worth a wait.
"""
LAST_LINES = 25
"""Of the log, in an error: a server's traceback is long, and its cause is not at the end."""


# --- The companion --------------------------------------------------------------------------------


async def run_companion(spec: EngineSpec, launcher: Launcher) -> None:
    """Until the launcher ends it, or the server it started dies. What an earlier life of it left in
    memory goes first.
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
                beside=[about_route(engine, Path(spec.model))],
            )
            starting.close()
            await serve_app(app, listener, ready=lambda: launcher.tell(Ready()))

        config = Config.model_validate_json(spec.config)
        with ExitStack() as starting:
            # which is ended when it stands still
            starting.enter_context(launcher.heart.doing("starts its server", limit=ENDLESS))
            await speak_for_server(
                *(config, Path(spec.model), serve),
                name=spec.name,
                url=spec.url,
                version=spec.version,
                staging=staging,
                say=lambda text: launcher.tell(Words(text)),
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
    """Starts a server, or attaches to the one at `url`; then `serve` answers for it. Ended by
    cancellation, or by the server's death.

    What is needed of the model is read before anything is started. Until the server is attached,
    clients wait in the socket.
    """
    kept = adapters_kept(config, model)
    first = model if kept else await asyncio.to_thread(write_first, model, staging)
    tokenizer = Tokenizer.load(model)
    wire = _wire(config, model)
    server = (
        started(config, first, name=name, version=version)
        if url is None
        else attached(config.engine, url, name=name)
    )
    async with server as running:
        engine = (AdapterEngine if kept else ServerEngine)(
            *(name, running.url, wire),
            tokenizer=tokenizer,
            model=model,
            receiver=receiver(stage_seconds=config.weights.stage_seconds),
            staging=staging,
            version=version,
            num_workers=config.engine.servers[0].world_size if config.engine.servers else None,
            direct=DirectWay(
                config.engine.kind, DirectFeed(answer_seconds=config.weights.stage_seconds)
            ),
            start_seconds=config.engine.start_seconds,
            works=running.works,
        )

        async def serve_attached() -> None:
            if caution := await engine.attached():
                say(caution)
            await serve(engine)

        await serve_while(running.died(), _run(engine), serve_attached())


async def _run(engine: ServerEngine) -> None:
    """A server that we cannot work with will be no better after a restart; one that does not answer
    may be.
    """
    try:
        await engine.run()
    except EngineUnavailable:
        raise
    except EngineError as error:
        raise RunFailed(str(error)) from error


def _wire(config: Config, model: Path) -> Server:
    num_experts = _recorded_experts(config, model)
    engine = config.engine
    theirs = bool(config.engine.urls)
    given = {
        "vocab_size": sizes_of(model).vocab_size,
        "max_running": engine.max_running,
        "num_experts": num_experts,
    }
    given["num_adapters"] = adapters_kept(config, model)
    if engine.kind == "vllm":
        return VllmServer(**given, theirs=theirs)
    given["num_choices"] = num_choices_of(model)
    direct = config.weights.transport == DIRECT
    return SglangServer(
        **given,
        max_context=config.model.max_context,
        theirs=theirs,
        deterministic=engine.deterministic,
        direct=direct,
    )


def adapters_kept(config: Config, model: Path) -> int:
    """Versions that a server keeps side by side, where they are adapters and stay so; else 0."""
    return (
        0 if config.lora.merged or adapter_of(model) is None else config.rollout.max_staleness + 2
    )


def _recorded_experts(config: Config, model: Path) -> int:
    """How many experts a layer of the model has, where what is chosen of them is to be recorded;
    else 0.
    """
    return num_experts_of(model) if config.correction.routing_replay else 0


# --- The server -----------------------------------------------------------------------------------


def interpreter(engine: EngineSection) -> Path:
    """Of the server's environment; `ConfigError` when it is not there. Not resolved: a virtual
    environment's is a link.
    """
    path = engine_python(engine).absolute()
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"starting {engine.kind}: there is no interpreter {path}; run `make engines`, which "
            "installs vLLM and SGLang, or set engine.python to that of an environment that has it."
        )
    return path


def check_interpreter(engine: EngineSection) -> None:
    """Before anything is started. Embedded engines and servers that run already need none."""
    if engine.kind != "embedded" and not engine.urls:
        interpreter(engine)


def command_for(
    config: Config, model: Path, *, version: int, port: int, inherited: Mapping[str, str]
) -> Command:
    dtype = served_dtype(config)
    adapter = adapter_of(model)
    served = Served(
        folder=model.absolute(),
        name=config.model.name,
        dtype=dtype,
        max_context=config.model.max_context,
        kv_bytes_per_token=sizes_of(model).kv_bytes_per_token(dtype),
        version=version,
        num_adapters=adapters_kept(config, model),
        rank=adapter.rank if adapter else 0,
        targets=adapter.targets if adapter else (),
        records_experts=_recorded_experts(config, model) > 0,
        has_other_towers=reads_more_than_text(model),
    )
    return server_command(
        config.engine, served, python=interpreter(config.engine), port=port, inherited=inherited
    )


def reserve_port() -> socket.socket:
    """A bound socket that does not listen: while it is open nobody is given its port by chance, and
    a server that asks for it gets it.
    """
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((HOST, 0))
    return made


class AttachedServer:
    """A server that others started and will end: whether it lives is found out by asking it."""

    works = None
    """It cannot be seen."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def died(self) -> NoReturn:
        """Waits for ever; ended by cancellation."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


@asynccontextmanager
async def attached(engine: EngineSection, url: str, *, name: str) -> AsyncGenerator[AttachedServer]:
    """A server at `url` that answers: waited for up to `engine.start_seconds`, because it may just
    have been started.
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
    """A server that answers; it ends with the context, or with this process. `RunFailed` with the
    end of its log when it does not come up.
    """
    log = Path(config.run.folder) / "logs" / f"{name}.server.log"
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        server = StartedServer(name, f"http://{HOST}:{port}", log)
        await server.start(
            command_for(config, model, version=version, port=port, inherited=os.environ)
        )
        try:
            await server.come_up(READY[config.engine.kind], seconds=config.engine.start_seconds)
            yield server
        finally:
            await server.stop()


class StandsStill(Exception):
    """A process that should move does not."""


class StartedServer:
    """The server's process, its address and its log. Its guard ends it and its children when this
    process ends, however that happens.
    """

    def __init__(self, name: str, url: str, log: Path) -> None:
        self.name = name
        self.url = url
        self.log = log
        self._log_began = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: Command) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_began = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *guarded(command.argv, seconds=STOP_SECONDS),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=command.environ,
                start_new_session=True,
            )

    def works(self) -> WorkedSince:
        """Watches the server for one wait of `ServerClient`."""
        assert self._process is not None
        return WorkedSince(self._process.pid)

    async def come_up(self, path: str, *, seconds: float) -> None:
        """Waits until it answers 200 at `path`, as long as it and its children move. Its death is
        `RunFailed`, because it would die again, unless somebody has killed it. That is
        `ServerLost`, and so it is where it does nothing for `seconds`."""
        try:
            await serve_while(
                answering(self.url + path), self.died(), self._standing_still(seconds)
            )
        except BaseExceptionGroup as errors:
            first = first_error(errors)
            if isinstance(first, StandsStill):
                said = (
                    f"starting {self.name}'s server: no answer from {self.url}{path}, and it "
                    f"{first}"
                )
                raise ServerLost(
                    f"{said}; raise engine.start_seconds, or look at {self._last_lines()}"
                ) from errors
            if isinstance(first, ServerLost) and first.was_killed:
                raise first from errors
            raise RunFailed(f"starting {self.name}'s server: {first}") from errors

    async def _standing_still(self, seconds: float) -> NoReturn:
        """Waits until it has done nothing for so long: `StandsStill`. Ended by cancellation."""
        assert self._process is not None
        motion = Motion(self._process.pid)
        while (still := motion.look()) < seconds:  # noqa: ASYNC110 (nothing tells of a process that does nothing)
            await asyncio.sleep(min(LOOK_SECONDS, seconds / 4))
        raise StandsStill(f"took no processor time, read and wrote nothing for {still:.0f} s")

    async def died(self) -> NoReturn:
        """Waits for its end, which nobody asked for: `ServerLost`."""
        assert self._process is not None
        status = await self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        lost = ServerLost(f"{self.name}'s server ended with {how}; {self._last_lines()}")
        lost.was_killed = status in KILLS
        raise lost

    async def stop(self) -> None:
        """Asks the server's process alone to end, because servers end their own children in order.
        Waits for that; ended by it, at the latest by a kill. The guard ends what is left of its
        children."""
        process = self._process
        self._process = None
        if process is None or process.returncode is not None:
            return
        try:
            process.terminate()
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()
        await process.wait()

    def _last_lines(self) -> str:
        text = self.log.read_bytes()[self._log_began :].decode(errors="replace")
        return f"the end of {self.log}:\n" + "\n".join(text.splitlines()[-LAST_LINES:])


async def answering(url: str) -> None:
    """Waits until a GET of `url` is answered 200; the caller has the deadline. `RunFailed` where
    something else listens there.
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
