"""The versions that engines serve, as several gateways know them. The gateway that hands versions
over tells the others (`VersionFeed`), and they follow it (`VersionFollower`).

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `VersionFollower.run` | the messages of the owner | the next that differs | a change of an engine there; the owner's next life |

The owner holds an engine, pauses it, commits, attests, and lets it go on. The others hear of each
of these at once. Until they do they count with the version before: their admission is then stricter
than it need be, and never laxer (I2). The version that a token was sampled by comes from its
engine. A request that another gateway sends to a paused engine waits there. While the owner is away
no version moves, so its last message stays true.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import EngineError
from midflight.gateway.fleet.fleet import EngineState, Fleet
from midflight.ports import Engine
from midflight.run.api.service import PREFIX
from midflight.run.parts import PartLost
from midflight.types import Version
from midflight.wire.client import HttpClient
from midflight.wire.edge import with_client
from midflight.wire.routes import json_answer, route

_log = logging.getLogger(__name__)
OWNER = "owner"
"""The name of the owner's holds."""
AGAIN_SECONDS = 0.2
"""The wait between two requests to an owner that is away."""


@dataclass(frozen=True, slots=True)
class ShardRole:
    """One gateway process among the `gateway.shards`."""

    number: int = 0
    ask: "Ask | None" = None
    """The way in which the process learns the versions that engines serve. The owner, which hands
    versions over, has none.
    """
    again: bool = False
    """The process died, and goes on from its store; the trainer and the other shards did not stop.
    It does not know yet which versions the engines serve.
    """


class EngineVersion(msgspec.Struct, frozen=True):
    """The owner's message about an engine that has attested a version in this life of the owner."""

    version: Version
    held: bool = False
    away: str | None = None
    """The reason why the engine takes no requests of rollouts."""


class FleetVersions(msgspec.Struct, frozen=True):
    """The owner's message about all engines at one moment. Engines of which it knows nothing yet
    are left out.
    """

    serial: str
    """The number of the moment; another life of the owner has other numbers."""
    engines: dict[str, EngineVersion]


Ask = Callable[[str], Awaitable[FleetVersions]]
"""Waits for the owner's message after the one of that serial. Raises `PartLost` if the owner does
not answer.
"""


class VersionFeed:
    """The owner's side. It has a new message after each change of an engine. It waits in `after`
    alone.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._life = secrets.token_hex(4)
        self._fleet = fleet
        self._count = 0
        self._changed = asyncio.Event()
        fleet.on_any = self._told

    def now(self) -> FleetVersions:
        served = self._fleet.served_version()
        said = {
            state.name: _engine_version(state, served)
            for state in self._fleet.states()
            if not state.is_new
        }
        return FleetVersions(f"{self._life}-{self._count}", said)

    async def after(self, serial: str) -> FleetVersions:
        """Waits for a message with another serial; ended by a change of any engine, or by its
        caller.
        """
        while True:
            said = self.now()
            if said.serial != serial:
                return said
            await self._changed.wait()

    def _told(self) -> None:
        self._count += 1
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()


def _engine_version(state: EngineState, served: Version) -> EngineVersion:
    """An engine that keeps an older version for an evaluation counts as away, and answers no other
    requests: its tokens would be older than admission counts with.
    """
    away = None if state.error is None else f"{type(state.error).__name__}: {state.error}"
    if away is None and state.reserved and state.version < served:
        away = f"it keeps version {state.version} for an evaluation"
    return EngineVersion(state.version, bool(state.held_by), away)


def served_route(feed: VersionFeed, *, token: str) -> BaseRoute:
    """`GET /midflight/v1/served?after=SERIAL`. Waits for a change, and for as long as the client
    does.
    """

    async def served(request: Request) -> Response:
        serial = request.query_params.get("after", "")
        said = await with_client(request.receive, feed.after(serial))
        return json_answer(said)

    return route(f"{PREFIX}/served", served, token=token, method="GET")


class OwnerClient:
    """Implements `Ask`. It makes a connection for each message; there are a few for each
    version.
    """

    def __init__(self, url: str, *, token: str) -> None:
        self._url = url
        self._token = token

    async def __call__(self, serial: str) -> FleetVersions:
        async with HttpClient(self._url, lost=PartLost, token=self._token) as http:
            answer = await http.call("GET", f"{PREFIX}/served?after={serial}")
        if answer.status != 200:
            said = answer.content[:200].decode(errors="replace")
            raise PartLost(f"the first gateway answered {answer.status}: {said}")
        return msgspec.json.decode(answer.content, type=FleetVersions)


class VersionFollower:
    """Lets the fleet of another gateway follow the owner's messages."""

    def __init__(self, fleet: Fleet, ask: Ask, *, answer_seconds: float) -> None:
        """An engine that hangs, and has not told its version within `answer_seconds`
        (`run.stall_seconds`), is asked again. An engine whose process dies is asked again at once.
        """
        self._fleet = fleet
        self._ask = ask
        self._answer_seconds = answer_seconds
        self._said: Mapping[str, EngineVersion] = {}
        self._asked: set[str] = set()
        """Engines that were asked for their version and have not answered."""

    async def run(self) -> None:
        """Waits for the owner's next message, for ever; ended by its task group."""
        serial = ""
        while True:
            try:
                said = await self._ask(serial)
            except PartLost:
                self._let_go()
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            serial = said.serial
            self.hear(said)

    def _let_go(self) -> None:
        """Releases the engines that an owner held when it was lost: one that it had paused goes on
        by itself, or with the next owner.
        """
        for state in self._fleet.states():
            if OWNER in state.held_by:
                self._fleet.release(state.name, OWNER)

    def hear(self, told: FleetVersions) -> None:
        """An engine that is out of quarantine there and in it here is let in by `rejoin`, which
        asks it first.
        """
        self._said = {**self._said, **told.engines}
        for state in self._fleet.states():
            said = told.engines.get(state.name)
            if said is not None:
                self._follow(state, said)

    def _follow(self, state: EngineState, said: EngineVersion) -> None:
        if said.away is not None:
            self._fleet.quarantine(state.name, EngineError(said.away))
        elif state.error is None and state.version != said.version:
            self._fleet.served(state.name, said.version)
        is_held = OWNER in state.held_by
        if said.held and not is_held:
            self._fleet.hold(state.name, OWNER)
        elif is_held and not said.held:
            self._fleet.release(state.name, OWNER)

    async def rejoin(self, engine: str) -> bool:
        """Lets an engine in if it serves the version that the owner has announced for it. Waits for
        the engine's answer. Returns `False` at once if the engine is being asked already.
        """
        found = next((one for one in self._fleet.engines() if one.name == engine), None)
        said = self._said.get(engine)
        if found is None or engine in self._asked:
            return False
        if said is None or said.away is not None:
            return False
        self._asked.add(engine)
        try:
            version = await self._version_of(found)
        finally:
            self._asked.discard(engine)
        if version is None or version != said.version or self._said.get(engine) != said:
            return False
        self._fleet.served(engine, version)
        return True

    async def _version_of(self, engine: Engine) -> Version | None:
        """The version that the engine serves, or None if it does not answer. Waits for the answer.
        The loss of the engine's connection ends the wait, or `answer_seconds`.
        """
        try:
            async with asyncio.timeout(self._answer_seconds):
                return (await engine.health()).version
        except TimeoutError:
            _log.warning(
                "engine %r has not said within %g s what it serves, and is asked again "
                "(run.stall_seconds)",
                engine.name,
                self._answer_seconds,
            )
        except (EngineError, OSError):
            pass
        return None
