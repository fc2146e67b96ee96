"""Implements `midflight join`: one engine in this process becomes a member of a run anywhere, and
leaves it in order. This imports torch for an engine of ours.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `JoinedEngine.run` | nothing | its interval | time; cancellation, which has it leave; being sent away, or a gateway that stays away |
"""

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.websockets import WebSocket

from midflight.config.sections import Config
from midflight.engines.app import build_app
from midflight.engines.introduction import about_route
from midflight.engines.relay import ServedEngine
from midflight.errors import ConfigError, RunFailed, SentAway
from midflight.observe.terminal import Terminal
from midflight.ports import Scorer
from midflight.run.api.membership import EngineAddress, EngineNeeds, Membership, MemberState
from midflight.run.api.membership_client import MembershipClient
from midflight.run.engine.single_engine import run_single_engine
from midflight.run.launcher import opening
from midflight.run.launcher.shutdown import main_task
from midflight.run.parts import PartLost, serve_while
from midflight.run.scratch import remove_left
from midflight.version import __version__
from midflight.wire.client import HttpAnswer, HttpClient
from midflight.wire.server import listen, serve_app

E = TypeVar("E", bound=ServedEngine)

SAY_SECONDS = 5.0
"""The time after which the engine's address is sent to the gateway again. A gateway that was
started anew knows of no engine that had joined.
"""


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """The address at which a run is joined, and the token for it."""

    url: str
    token: str = field(repr=False)

    def client(self) -> HttpClient:
        return HttpClient(
            self.url,
            lost=lambda what: PartLost(f"the gateway at {self.url} {what}"),
            token=self.token,
        )


async def asked(door: GatewayAccess, *, name: str, patience_seconds: float) -> EngineNeeds:
    """Asks the run for its requirements on an engine. Waits for the answer, at most
    `patience_seconds`. Raises `ConfigError` if there is no answer, the token is wrong, the run has
    another version, or the name is taken.
    """
    if not re.fullmatch(r"https?://[^\s/?#@]+/?", door.url):
        raise ConfigError(
            f"--url is {door.url!r}: give the gateway's address, such as http://10.0.0.5:8000."
        )
    try:
        async with door.client() as http:
            answer = await MembershipClient(http).members(seconds=_bounded(patience_seconds))
    except PartLost as lost:
        raise ConfigError(
            f"nothing answers at {door.url} ({lost.__cause__}): give the address that the run "
            "printed, as seen from here."
        ) from lost
    _check_token(door, answer)
    try:
        found = msgspec.json.decode(answer.content, type=Membership)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{door.url} answered {answer.status} and is no gateway that engines of Midflight "
            f"{__version__} join."
        ) from error
    if found.run.midflight != __version__:
        raise ConfigError(
            f"the run at {door.url} is of Midflight {found.run.midflight}, this is {__version__}: "
            "install the same."
        )
    if any(member.name == name and member.state == "serving" for member in found.engines):
        raise ConfigError(f"the run has an engine {name!r} that serves: choose another --name.")
    return found.run


def _check_token(door: GatewayAccess, answer: HttpAnswer) -> None:
    if answer.status == 401:
        raise ConfigError(
            f"the gateway at {door.url} does not accept the token: give the control token that the "
            "run printed, by --token."
        )


def default_name() -> str:
    """A name for this process: letters and digits of the machine's name, and the process id."""
    machine = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:40]
    return f"{machine or 'engine'}-{os.getpid()}"


def own_address(url: str) -> str:
    """The address that this machine has on the way to the gateway. The gateway finds it by the same
    address, unless there is something between.
    """
    host = urlsplit(url).hostname or ""
    port = urlsplit(url).port or 80
    try:
        family, kind, _, _, to = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--url is {url!r}: this machine knows no way to {host!r} ({error})."
        ) from error


class JoinedEngine:
    """The membership of one engine."""

    def __init__(
        self,
        door: GatewayAccess,
        name: str,
        *,
        patience_seconds: float,
        drain_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """A gateway may stay away for `patience_seconds` before the engine gives up. It lets
        requests end here for `drain_seconds` when the engine leaves.
        """
        self.name = name
        self._door = door
        self._say = say
        self._patience_seconds = patience_seconds
        self._drain_seconds = drain_seconds
        self._told = ""
        self._is_member = False

    async def run(self, address: EngineAddress, up: asyncio.Event) -> None:
        """Waits for the engine to be `up`, then sends its address again and again. It is ended by
        being sent away, or by cancellation: then it leaves.
        """
        await up.wait()
        async with self._door.client() as http:
            client = MembershipClient(http)
            try:
                await self._stay(client, address)
            except SentAway as told:
                self._is_member = False
                self._say(str(told))
            finally:
                if self._is_member:
                    await self._leave(client)

    async def _stay(self, client: MembershipClient, address: EngineAddress) -> None:
        clock = asyncio.get_running_loop().time
        heard = clock()
        while True:
            try:
                said = msgspec.structs.replace(address, again=self._is_member)
                answer = await client.put(self.name, said, seconds=_bounded(self._patience_seconds))
                heard = clock()
                self._hear(answer)
            except PartLost as lost:
                if not self._is_member or clock() - heard >= self._patience_seconds:
                    raise RunFailed(f"{lost}. Start this again when the run is back.") from lost
                self._tell(f"{lost}; it is asked again for {self._patience_seconds:g} s")
            await asyncio.sleep(SAY_SECONDS)

    def _hear(self, answer: HttpAnswer) -> None:
        """Takes an answer. An error that ends the first attempt may pass later, such as another
        engine with this name, or a network that was broken for a while.
        """
        _check_token(self._door, answer)
        if answer.status < 300:
            self._is_member = True
            state = msgspec.json.decode(answer.content, type=MemberState)
            if state.state == "serving":
                joined = f"{self.name} has joined {self._door.url}"
                self._tell(f"{joined} and serves version {state.version}")
            else:
                self._tell(f"{self.name}: {state.error or f'is {state.state}'}")
            return
        message, code = _error_in(answer)
        if code == SentAway.code:
            raise SentAway(message)
        if not self._is_member:
            raise ConfigError(message)
        self._tell(message)

    async def _leave(self, client: MembershipClient) -> None:
        """Waits for the requests that may end here. It is ended by them, by a gateway that is gone,
        or by a second signal.
        """
        self._say(f"{self.name} leaves: its requests may end")
        try:
            answer = await client.leave(
                self.name,
                force=True,
                seconds=_bounded(self._drain_seconds + self._patience_seconds),
            )
        except PartLost as lost:
            self._say(str(lost))
        else:
            self._say(f"{self.name} has left" if answer.status < 300 else _error_in(answer)[0])

    def _tell(self, text: str) -> None:
        """Says a text, but none twice in a row. Texts that differ only in a version count as the
        same.
        """
        key = re.sub(r"version \d+", "version", text)
        if key != self._told:
            self._told = key
            self._say(text)


def _bounded(seconds: float) -> float:
    """The limit for one answer. Without this, 0 would be no limit."""
    return max(seconds, SAY_SECONDS)


def _error_in(answer: HttpAnswer) -> tuple[str, str]:
    try:
        error = msgspec.json.decode(answer.content)["error"]
        return str(error["message"]), str(error["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        content = answer.content[:200].decode(errors="replace")
        return f"the gateway answered {answer.status}: {content}", ""


def run(
    config: Config,
    door: GatewayAccess,
    *,
    name: str,
    host: str | None,
    port: int,
    advertised: str | None,
    patience_seconds: float,
) -> int:
    """Runs the engine until a signal, or until the run sends it away."""
    model = config.model.path
    assert model is not None
    with Terminal(as_json=config.observe.log_format == "json") as terminal:
        terminal.say(opening.serving(config, logs=False))
        place = (own_address(door.url) if host is None else host, port)
        joined = JoinedEngine(
            door,
            name,
            patience_seconds=patience_seconds,
            drain_seconds=config.gateway.drain_seconds,
            say=terminal.say,
        )
        return main_task(join(config, model, joined, place, advertised))


async def join(
    config: Config,
    model: Path,
    joined: JoinedEngine,
    place: tuple[str, int],
    advertised: str | None,
) -> None:
    """Serves until it is cancelled or sent away, and then leaves in order. The death of the engine
    ends it too: nothing is started again here.
    """
    remove_left()
    with listen(*place) as listener:
        host = f"[{place[0]}]" if ":" in place[0] else place[0]
        token = secrets.token_urlsafe(24)
        up = asyncio.Event()
        address = EngineAddress(advertised or f"http://{host}:{listener.getsockname()[1]}", token)

        async def serve(
            engine: E, wire: Callable[[E, WebSocket], Awaitable[None]], scorer: Scorer | None = None
        ) -> None:
            app = build_app(
                engine, wire, token=token, scorer=scorer, beside=[about_route(engine, model)]
            )
            await serve_app(app, listener, ready=up.set)

        engine = run_single_engine(config, model, serve, name=joined.name)
        # The membership is the main part: the engine goes on until it has left.
        await serve_while(joined.run(address, up), engine)
