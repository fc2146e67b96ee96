"""Engines that join, move and leave while the run goes on.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Connections.run` | nothing | the ends of connections | cancellation, or a fault of ours in one of them |
| `Members.run` | connections that are down | its interval | time |

An engine that joins is treated as one that rejoins: it is in quarantine from its first moment, and
`Rejoin` brings it the current version, as it does to one that was started again. Everything that
could keep it from serving is checked before anything is changed.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from midflight.config.sections import Config
from midflight.engines.introduction import NONCE, About
from midflight.errors import (
    EngineRefused,
    EngineUnavailable,
    MemberConflict,
    NotSupported,
    SentAway,
    UnknownEngine,
    nearest,
)
from midflight.gateway.fleet.fleet import EngineState
from midflight.models.identity import Leaf, ModelIdentity
from midflight.ports import Engine
from midflight.run.api.membership import (
    EngineAddress,
    EngineLeftAnswer,
    EngineNeeds,
    Membership,
    MemberState,
)
from midflight.run.parts import TEACHER
from midflight.run.rollout.serving import Serving
from midflight.types.facts import EngineJoined, EngineLeft, Record
from midflight.version import __version__
from midflight.weights.transports.kinds import FILES, SENT
from midflight.weights.transports.memory_files import SHARED
from midflight.wire.hosts import is_loopback

LEAVING = "leaving"
"""The name of the hold of an engine that is about to go."""
LOOK_SECONDS = 5.0
"""The seconds between two looks at engines that have joined."""
MAX_SENT_AWAY = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Attachable(Engine, Protocol):
    """An engine behind a connection."""

    @property
    def is_attached(self) -> bool: ...
    async def run(self) -> None: ...
    async def connect(self, *, seconds: float) -> None: ...


Ask = Callable[[EngineAddress, Path | None, bool], Awaitable[About]]
"""Asks an engine about itself: whether it sees that file, and, if the bool is true, which weights
it was started with. The latter takes seconds.
"""


class Connections:
    """The connections of all engines; each is held from `open` to `close`."""

    def __init__(self, first: Iterable[Attachable]) -> None:
        self._first = tuple(first)
        self._tasks: dict[Attachable, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Runs the connections until it is cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for engine in self._first:
                self.open(engine)
            await asyncio.Event().wait()

    def open(self, engine: Attachable) -> None:
        self._tasks[engine] = self.start(engine.run())

    def close(self, engine: Attachable) -> None:
        self._tasks.pop(engine).cancel()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts work that goes on beside the connections, though its caller may end."""
        assert self._group is not None, "connections are opened while `run` runs"
        return self._group.create_task(work)


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """The terms on which engines join and leave the run."""

    model: Path
    """The folder that the run's engines were started from."""
    settings: Mapping[str, Leaf]
    transport: str | None
    """The transport of weights, or None if they stay as they are."""
    drain_seconds: float
    stall_seconds: float
    """An engine that has described itself must be attached within this time, or it counts as hung.
    A member that had no connection for as long, and did not give its address either, is removed:
    its machine is gone. When the engine is back, it joins again.
    """


def settings_of(config: Config) -> Mapping[str, Leaf]:
    """The settings that engines of one run must have alike, and the time that an engine which
    leaves has for its requests.
    """
    return {
        "model.max_context": config.model.max_context,
        "model.dtype": config.model.dtype,
        "engine.dtype": config.engine.dtype,
        "correction.routing_replay": config.correction.routing_replay,
        "gateway.drain_seconds": config.gateway.drain_seconds,
    }


@dataclass(slots=True)
class _KnownEngine:
    engine: Attachable
    address: EngineAddress
    process: str = ""
    """The process as `About` has it. It is empty for engines that were there from the start, which
    are never forgotten.
    """
    num_missed: int = 0
    """The number of looks in a row that found the engine without a connection, and without a word
    since the look before. Looks are counted rather than time, because time without a look is not an
    absence of the engine.
    """

    @property
    def away_seconds(self) -> float:
        """The time between the first of these looks and the last."""
        return LOOK_SECONDS * max(0, self.num_missed - 1)


class Members:
    """Implements `EngineMembership`. Between two waits its state is whole: a refused or cancelled
    call has changed nothing.
    """

    def __init__(
        self,
        serving: Serving,
        connections: Connections,
        first: Mapping[str, tuple[Attachable, EngineAddress]],
        *,
        terms: JoinTerms,
        ask: Ask,
        connect: Callable[[str, EngineAddress], Attachable],
        record: Record,
    ) -> None:
        """`first` are the engines that the serving side has. `connect` makes an engine that is not
        connected yet.
        """
        self._serving = serving
        self._handover = serving.handover
        self._limits = serving.gateway.limits
        self._connections = connections
        self._terms = terms
        self._record = record
        self._ask = ask
        self._connect = connect
        self._known = {
            name: _KnownEngine(engine, address) for name, (engine, address) in first.items()
        }
        self._joining: set[str] = set()
        self._leaving: dict[str, asyncio.Task[EngineLeftAnswer]] = {}
        self._sent_away: dict[str, None] = {}
        """Processes of engines that have left, in the order in which they left."""
        self._identity: ModelIdentity | None = None

    async def run(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group. Forgets engines that
        are gone for good.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for name, known in list(self._known.items()):
                self._look(name, known)

    def _look(self, name: str, known: _KnownEngine) -> None:
        if not known.process or known.engine.is_attached:
            known.num_missed = 0
        else:
            known.num_missed += 1
        limit = self._terms.stall_seconds
        if known.away_seconds >= limit and name not in self._leaving:
            self._let_go(name, f"was out of reach for {limit:g} s (run.stall_seconds)")

    def members(self) -> Membership:
        states = tuple(
            self._state(state) for state in self._serving.states() if state.name in self._known
        )
        needs = EngineNeeds(__version__, str(self._terms.model), self._terms.settings)
        return Membership(states, needs)

    # --- Joining and moving -----------------------------------------------------------------------

    async def put(self, name: str, address: EngineAddress) -> tuple[MemberState, bool]:
        """Waits for the engine's answers, each with a deadline."""
        self._check_name(name, address)
        known = self._known.get(name)
        if known is not None and known.address.place == address.place:
            known.num_missed = 0
            return self._state_of(name), False
        if name in self._joining:
            raise MemberConflict(
                f"an engine {name!r} is joining at this moment: ask again when that has ended.",
                param="name",
            )
        self._joining.add(name)
        try:
            joiner = await self._approached(name, address)
        finally:
            self._joining.discard(name)
        try:
            self._check_name(name, address)
            self._check_process(name, joiner.process, address)
        except MemberConflict:
            self._connections.close(joiner.engine)
            raise
        if name in self._known:
            self._let_go(name, f"moved to {address.url}")
        self._take_in(name, joiner)
        return self._state_of(name), known is None

    async def _approached(self, name: str, address: EngineAddress) -> _KnownEngine:
        """Returns an engine that can join, connected. If this ends in any other way, nothing is
        left of it.
        """
        about = await self._asked(name, address)
        self._check_process(name, about.process, address)
        await self._check(name, address, about)
        engine = self._connect(name, address)
        self._connections.open(engine)
        try:
            await engine.connect(seconds=self._terms.stall_seconds)
        except BaseException as error:
            self._connections.close(engine)
            if isinstance(error, EngineUnavailable):
                raise EngineRefused(f"attaching the engine: {error}", param="url") from error
            raise
        return _KnownEngine(engine, address, about.process)

    def _take_in(self, name: str, joiner: _KnownEngine) -> None:
        self._known[name] = joiner
        self._sent_away.pop(joiner.process, None)
        fleet = self._serving.home(name)
        error = None
        if not self._is_apart(name):
            error = EngineUnavailable("it has just joined, and gets the current weights first")
        fleet.attach(joiner.engine, version=fleet.served_version(), error=error)
        if fleet is self._serving.apart:
            self._serving.beside.forsaken = ""
        self._record(EngineJoined(name, joiner.address.url))

    def _let_go(self, name: str, why: str) -> int:
        """Returns the number of requests that the engine still had."""
        known = self._known.pop(name)
        lost = self._serving.home(name).detach(name)
        self._connections.close(known.engine)
        self._record(EngineLeft(name, why, lost))
        return lost

    # --- Leaving ----------------------------------------------------------------------------------

    async def leave(
        self, name: str, *, force: bool, drain_seconds: float | None, for_good: bool = False
    ) -> EngineLeftAnswer:
        """Goes on when the caller does not wait any more. A second call waits for the same end."""
        known = self._known.get(name)
        if known is None:
            raise UnknownEngine(
                f"there is no engine {name[:80]!r}.{nearest(name, self._known)}", param="name"
            )
        leaving = self._leaving.get(name)
        if leaving is None:
            if not force:
                self._check_others(name)
            seconds = self._terms.drain_seconds if drain_seconds is None else drain_seconds
            leaving = self._connections.start(self._leave(name, known.process, seconds, for_good))
            self._leaving[name] = leaving
        return await asyncio.shield(leaving)

    async def _leave(
        self, name: str, process: str, seconds: float, for_good: bool
    ) -> EngineLeftAnswer:
        """Waits for its requests, which end by themselves, or for the seconds to pass."""
        fleet = self._serving.home(name)
        fleet.hold(name, LEAVING)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await fleet.emptied(name)
            if process:
                self._note_sent_away(process)
            left = EngineLeftAnswer(name, self._let_go(name, "left"))
            if for_good:
                self._serving.give_up(name)
            return left
        finally:
            fleet.release(name, LEAVING)
            del self._leaving[name]

    def _note_sent_away(self, process: str) -> None:
        self._sent_away[process] = None
        for oldest in list(self._sent_away)[:-MAX_SENT_AWAY]:
            del self._sent_away[oldest]

    def _check_others(self, name: str) -> None:
        states = self._serving.home(name).states()
        serving = {state.name for state in states if state.error is None}
        if serving - self._leaving.keys() == {name}:
            raise MemberConflict(
                f"{name} is the only engine that serves: without it requests would wait until they "
                "fail. Let another join first, or say force=true, as one must whose machine is "
                "taken away.",
                param="name",
            )

    # --- What must be so --------------------------------------------------------------------------

    def _check_name(self, name: str, address: EngineAddress) -> None:
        if not _NAME.fullmatch(name) or name == TEACHER:
            raise EngineRefused(
                f"an engine cannot be called {name[:80]!r}: take a letter or digit, then at "
                "most 63 letters, digits, '.', '_' or '-'.",
                param="name",
            )
        if name in self._leaving:
            raise MemberConflict(f"{name} is leaving: ask again when it has left.", param="name")
        for other, known in self._known.items():
            if other != name and known.address.url.rstrip("/") == address.url.rstrip("/"):
                raise MemberConflict(
                    f"the engine at {address.url} is a member already, as {other}.", param="url"
                )

    def _check_process(self, name: str, process: str, address: EngineAddress) -> None:
        if address.again and process in self._sent_away:
            raise SentAway(
                f"the engine at {address.url} was told to leave this run: start another, or "
                "let it join as a new one.",
                param="name",
            )
        for other, known in self._known.items():
            if other != name and known.process == process:
                raise MemberConflict(
                    f"the engine at {address.url} is a member already, as {other} at "
                    f"{known.address.url}.",
                    param="url",
                )

    def _is_apart(self, name: str) -> bool:
        """True if the engine keeps the weights with which the run began or went on, in all its
        lives. It gets no others, and only its own are asked for.
        """
        return self._serving.home(name) is self._serving.apart

    async def _asked(self, name: str, address: EngineAddress) -> About:
        """The engine's answers. Raises `EngineRefused` if the weights that it needs cannot reach
        it.
        """
        if self._is_apart(name):
            return await self._ask(address, None, True)
        current = self._handover.current
        transport = self._terms.transport
        folder = SHARED
        location = ""
        if current is not None:
            transport = current.transport
            location = current.location
            if transport in FILES:
                folder = Path(location).parent
        with _nonce(folder) as nonce:
            about = await self._ask(address, nonce, current is None)
            seen = nonce is None or about.sees == _word(nonce)
        if seen:
            return about
        obstacle = _obstacle(transport, folder, location)
        if obstacle:
            raise EngineRefused(
                f"weights cannot reach the engine at {address.url}: {obstacle}", param="url"
            )
        return about

    async def _check(self, name: str, address: EngineAddress, about: About) -> None:
        """Waits for the files of the run's model to be read, the first time."""
        what = f"the engine at {address.url} cannot join"
        if about.midflight != __version__:
            raise EngineRefused(
                f"{what}: it is of Midflight {about.midflight}, the run of {__version__}; "
                "install the same.",
                param="url",
            )
        apart = self._is_apart(name)
        first = self._serving.home(name).served_version()
        unpublished = apart or self._handover.current is None
        if self._identity is None or (unpublished and self._identity.weights is None):
            self._identity = await asyncio.to_thread(
                ModelIdentity.of, self._terms.model, weights=unpublished
            )
        why = self._identity.difference(about.model) or self._limits.lacking(about.capabilities)
        if why:
            raise EngineRefused(
                f"{what}: {why}. Start it from {self._terms.model} with the run's settings.",
                param="url",
            )
        if unpublished and about.version != first:
            said = f"{name} keeps version {first}" if apart else "the run has published none yet"
            raise EngineRefused(
                f"{what}: it serves version {about.version}, and {said}; start it anew.",
                param="url",
            )
        try:
            self._handover.check(name, about.capabilities)
        except NotSupported as error:
            raise EngineRefused(f"{what}: {error}", param="url") from error

    # --- States -----------------------------------------------------------------------------------

    def _state_of(self, name: str) -> MemberState:
        return next(self._state(state) for state in self._serving.states() if state.name == name)

    def _state(self, state: EngineState) -> MemberState:
        word = LEAVING if state.name in self._leaving else standing(state)
        error = None if state.error is None else str(state.error)
        return MemberState(
            state.name,
            self._known[state.name].address.url,
            word,
            state.version,
            state.num_requests,
            error,
        )


def standing(state: EngineState) -> str:
    """The state in one word."""
    if LEAVING in state.held_by:
        return LEAVING
    if state.error is None:
        return "serving"
    return "joining" if state.is_new else "quarantined"


# --- Where weights lie ----------------------------------------------------------------------------


@contextlib.contextmanager
def _nonce(folder: Path) -> Generator[Path | None]:
    """Yields a file that holds a random word, for the block. Yields None if the file cannot be
    written: then it is unknown whether an engine sees our files.
    """
    path = folder / f"{NONCE}{secrets.token_hex(8)}"
    try:
        path.write_text(_word(path))
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _word(nonce: Path) -> str:
    return nonce.name.removeprefix(NONCE)[::-1]


def _obstacle(transport: str | None, folder: Path, location: str) -> str:
    """Returns the reason why an engine that does not see the gateway's files gets no weights, or an
    empty string if it does get them.
    """
    if transport in FILES:
        return (
            f"they lie in {folder}, which it does not see, as on another machine; set "
            'weights.transport to "pull", or share that folder.'
        )
    if transport not in SENT or not location:
        return ""
    host = urlsplit(location.split()[0]).hostname or ""
    if is_loopback(host):
        return (
            f"the trainer sends them from {host}, which other machines do not reach; set "
            "gateway.host to an address of its machine."
        )
    return ""
