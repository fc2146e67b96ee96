"""What engines serve, as the one gateway says that hands versions over, to others that share its
engines.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Follower.run` | the owner's words | the next that says something else | a change of an engine there; the owner's next life |

The owner holds an engine, pauses it, commits, attests, and lets it go on; of each of these the
others hear at once, and until they do they count the version before: their admission is then
stricter than it need be, and never laxer (I2). What a token was sampled by its engine says. A
request that one of them sends to a paused engine waits there. While the owner is away no version
moves, so what it said last holds.
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
"""Before an owner that is away is asked again."""


@dataclass(frozen=True, slots=True)
class ShardRole:
    """Which of `gateway.shards` a process is."""

    number: int = 0
    ask: "Ask | None" = None
    """How it hears what engines serve; the one that hands versions over knows."""
    again: bool = False
    """It died, and goes on from its store while the trainer and the other shards went on: it has
    yet to hear what engines serve.
    """


class EngineWord(msgspec.Struct, frozen=True):
    """Of an engine that has attested a version in this life of the owner."""

    version: Version
    held: bool = False
    away: str | None = None
    """Why it takes no requests of rollouts."""


class ServedWord(msgspec.Struct, frozen=True):
    """All engines at one moment; those that the owner has yet to hear of are left out."""

    serial: str
    """Of the moment; another life of the owner has others."""
    engines: dict[str, EngineWord]


Ask = Callable[[str], Awaitable[ServedWord]]
"""Waits for the owner's word after the one of that serial; `PartLost` where it does not answer."""


class ServedNews:
    """The owner's. It waits in `after` alone."""

    def __init__(self, fleet: Fleet) -> None:
        self._life = secrets.token_hex(4)
        self._fleet = fleet
        self._count = 0
        self._changed = asyncio.Event()
        fleet.on_any = self._told

    def now(self) -> ServedWord:
        served = self._fleet.served_version()
        said = {
            state.name: _word(state, served) for state in self._fleet.states() if not state.is_new
        }
        return ServedWord(f"{self._life}-{self._count}", said)

    async def after(self, serial: str) -> ServedWord:
        """Waits for a change since then; ended by any of an engine, or by its caller."""
        while (word := self.now()).serial == serial:
            await self._changed.wait()
        return word

    def _told(self) -> None:
        self._count += 1
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()


def _word(state: EngineState, served: Version) -> EngineWord:
    """One that keeps an older version for an evaluation answers nobody else: its tokens would be
    older than what admission counts with.
    """
    away = None if state.error is None else f"{type(state.error).__name__}: {state.error}"
    if away is None and state.reserved and state.version < served:
        away = f"it keeps version {state.version} for an evaluation"
    return EngineWord(state.version, bool(state.held_by), away)


def served_route(news: ServedNews, *, token: str) -> BaseRoute:
    """`GET /midflight/v1/served?after=SERIAL`. Waits for news, and for as long as the client
    does.
    """

    async def served(request: Request) -> Response:
        return json_answer(
            await with_client(request.receive, news.after(request.query_params.get("after", "")))
        )

    return route(f"{PREFIX}/served", served, token=token, method="GET")


class OwnerClient:
    """Implements `Ask`: a connection for each word, of which there are a few for each version."""

    def __init__(self, url: str, *, token: str) -> None:
        self._url = url
        self._token = token

    async def __call__(self, serial: str) -> ServedWord:
        async with HttpClient(self._url, lost=PartLost, token=self._token) as http:
            answer = await http.call("GET", f"{PREFIX}/served?after={serial}")
        if answer.status != 200:
            raise PartLost(
                f"the first gateway answered {answer.status}: "
                f"{answer.content[:200].decode(errors='replace')}"
            )
        return msgspec.json.decode(answer.content, type=ServedWord)


class Follower:
    """Lets the fleet of another gateway follow the owner's words."""

    def __init__(self, fleet: Fleet, ask: Ask, *, answer_seconds: float) -> None:
        """An engine that hangs, and has not said within `answer_seconds` (`run.stall_seconds`)
        which version it serves, is asked again. One whose process dies is asked again at once."""
        self._fleet = fleet
        self._ask = ask
        self._answer_seconds = answer_seconds
        self._said: Mapping[str, EngineWord] = {}
        self._asked: set[str] = set()
        """Engines that have yet to say what they serve."""

    async def run(self) -> None:
        """Waits for the owner's next word, for ever; ended by its task group."""
        serial = ""
        while True:
            try:
                word = await self._ask(serial)
            except PartLost:
                self._let_go()
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            serial = word.serial
            self.hear(word)

    def _let_go(self) -> None:
        """Engines that an owner held when it was lost: one that it had paused goes on by itself, or
        with the next owner.
        """
        for state in self._fleet.states():
            if OWNER in state.held_by:
                self._fleet.release(state.name, OWNER)

    def hear(self, word: ServedWord) -> None:
        """An engine that is out of quarantine there and in it here is let in by `rejoin`, which
        asks it first.
        """
        self._said = {**self._said, **word.engines}
        for state in self._fleet.states():
            if (said := word.engines.get(state.name)) is None:
                continue
            if said.away is not None:
                self._fleet.quarantine(state.name, EngineError(said.away))
            elif state.error is None and state.version != said.version:
                self._fleet.served(state.name, said.version)
            if said.held != (OWNER in state.held_by):
                (self._fleet.hold if said.held else self._fleet.release)(state.name, OWNER)

    async def rejoin(self, engine: str) -> bool:
        """An engine is let in if it serves what the owner says that it does. Waits for its answer;
        `False` at once while it is asked already.
        """
        found = next((one for one in self._fleet.engines() if one.name == engine), None)
        if (
            found is None
            or engine in self._asked
            or (said := self._said.get(engine)) is None
            or said.away is not None
        ):
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
        """The version that the engine serves; None where it does not say. Waits for its answer. The
        loss of its connection ends the wait, or `answer_seconds`."""
        try:
            async with asyncio.timeout(self._answer_seconds):
                return (await engine.health()).version
        except TimeoutError:
            _log.warning(
                (
                    "engine %r has not said within %g s what it serves, and is asked again "
                    "(run.stall_seconds)"
                ),
                engine.name,
                self._answer_seconds,
            )
        except (EngineError, OSError):
            pass
        return None
