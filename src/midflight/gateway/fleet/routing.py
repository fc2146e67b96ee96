"""Which request goes to which engine: named holds, the line before the engines, the choice among them, a reservation; and a pause that
several owners share."""

import asyncio
import bisect
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from midflight.allowance import Allowance
from midflight.errors import EngineUnavailable
from midflight.ports import Engine
from midflight.types import Attestation, Capabilities, Chunk, EngineHealth, GenerateRequest, PauseMode, Version, WeightManifest

T = TypeVar("T")


class Holds:
    """Named holds, of all engines or of one. Synchronous. An engine is free when there is no hold of it and none of all engines."""

    def __init__(self) -> None:
        self._all: set[str] = set()
        self._one: defaultdict[str, set[str]] = defaultdict(set)

    def hold(self, owner: str, engine: str | None = None) -> None:
        """Idempotent per owner and engine; `None` holds every engine, also those attached later."""
        (self._all if engine is None else self._one[engine]).add(owner)

    def release(self, owner: str, engine: str | None = None) -> None:
        """Lifts this owner's hold only; none there is not an error."""
        if engine is None:
            self._all.discard(owner)
        elif engine in self._one:
            self._one[engine].discard(owner)
            self._drop_empty(engine)

    def forget(self, engine: str) -> None:
        """Drops the holds of an engine that is detached."""
        self._one.pop(engine, None)

    def owners(self, engine: str) -> tuple[str, ...]:
        """The names of those that hold the engine."""
        return tuple(sorted(self._all | self._one.get(engine, set())))

    def held(self, engine: str) -> bool:
        """Whether anybody holds it."""
        return bool(self._all or self._one.get(engine))

    @property
    def none(self) -> bool:
        """Whether no engine is held."""
        return not (self._all or self._one)

    @property
    def shut(self) -> bool:
        """Whether all engines are held."""
        return bool(self._all)

    def _drop_empty(self, engine: str) -> None:
        if not self._one[engine]:
            del self._one[engine]


class _Waiter(Generic[T]):
    def __init__(self, choose: Callable[[], T | None], allowance: Allowance) -> None:
        self.choose = choose
        self.allowance = allowance
        self.chosen: asyncio.Future[T] = asyncio.get_running_loop().create_future()


class WaitingLine(Generic[T]):
    """Requests waiting for a place, in order of their tickets. A resumed request keeps its ticket, so it goes first.

    No request overtakes another: a place is offered to the first in line, and a new request stands behind all older tickets.
    Bounded by the requests that the gateway admits.
    """

    def __init__(self) -> None:
        self._waiters: list[tuple[int, int, _Waiter[T]]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, ticket: int, choose: Callable[[], T | None], *, give_back: Callable[[T], None], allowance: Allowance) -> T:
        """Waits until `choose` finds a place and every older ticket has one; woken by `serve`, ended by the allowance too.

        A place found for a request that has just ended is given back.
        """
        allowance.raise_if_cut()
        if not self._waiters and (place := choose()) is not None:
            return place
        waiter = _Waiter(choose, allowance)
        self._arrivals += 1
        entry = (ticket, self._arrivals, waiter)
        bisect.insort(self._waiters, entry)
        self.serve()
        try:
            async with allowance:
                return await waiter.chosen
        except BaseException:
            if waiter.chosen.done() and not waiter.chosen.cancelled():
                give_back(waiter.chosen.result())
            self._leave(entry)
            raise

    def serve(self) -> None:
        """Offers places from the front until one finds none. To be called after every change that may make a place."""
        while self._waiters:
            waiter = self._waiters[0][2]
            if not waiter.chosen.done():
                place = waiter.choose()
                if place is None:
                    return
                waiter.chosen.set_result(place)
            self._waiters.pop(0)

    def allowances(self) -> Iterable[Allowance]:
        return (waiter.allowance for _, _, waiter in self._waiters)

    def _leave(self, entry: tuple[int, int, _Waiter[T]]) -> None:
        if entry in self._waiters:
            self._waiters.remove(entry)
            self.serve()


_NEAR = 1.25
"""Engines with at most this multiple of the lightest load count as equally loaded; among them the newest version is taken.
Below the 1.3 within which the load must stay even."""

_CROWDED = 1.25
"""A session leaves its engine when that has this multiple of the mean load. Sessions differ so much in length that affinity
alone leaves the heaviest of eight engines at 1.8 times the mean; between this and 1.3 there is room for requests on their way."""

_MAX_PINS = 20_000
"""Twice the sessions a gateway admits by default. Forgetting the oldest costs that session its prefix cache, nothing else."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine as the router sees it. `routable`: attached, not in quarantine, not held."""

    name: str
    version: Version
    tokens_in_flight: int
    """Prompt tokens plus output budget of the requests there."""
    routable: bool


def choose(candidates: Sequence[Candidate], *, pinned: str | None, tokens: int = 0) -> str | None:
    """The pinned engine if it is routable and not crowded; else the newest version among the least loaded, the lightest first.

    `tokens` is the load the request brings: to move it costs a prefill of that size at most, so a smaller difference moves
    nobody. `None` if no engine is routable. Equal engines are taken in the order given.
    """
    routable = [c for c in candidates if c.routable]
    if not routable:
        return None
    lightest = min(c.tokens_in_flight for c in routable)
    home = next((c for c in routable if c.name == pinned), None)
    if home is not None and not _is_crowded(home, routable, spare=lightest + tokens):
        return pinned
    near = (c for c in routable if c.tokens_in_flight <= lightest * _NEAR)
    return min(near, key=lambda c: (-c.version, c.tokens_in_flight)).name


def _is_crowded(home: Candidate, routable: Sequence[Candidate], *, spare: int) -> bool:
    mean = sum(c.tokens_in_flight for c in routable) / len(routable)
    return home.tokens_in_flight > max(spare, _CROWDED * mean)


class Pins:
    """The engine that holds each session's prefix. Synchronous, bounded; the longest unused pin goes first."""

    def __init__(self, *, max_pins: int = _MAX_PINS) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()
        self._max_pins = max_pins

    def get(self, affinity: str) -> str | None:
        return self._engines.get(affinity)

    def pin(self, affinity: str, engine: str) -> None:
        """An empty affinity belongs to no session and is not remembered."""
        if not affinity:
            return
        self._engines[affinity] = engine
        self._engines.move_to_end(affinity)
        if len(self._engines) > self._max_pins:
            self._engines.popitem(last=False)

    def forget(self, affinity: str) -> None:
        self._engines.pop(affinity, None)

    def forget_engine(self, engine: str) -> None:
        """The engine is gone: its sessions are pinned again where they go next."""
        for affinity in [a for a, name in self._engines.items() if name == engine]:
            del self._engines[affinity]

    def __len__(self) -> int:
        return len(self._engines)


class Reservation:
    """One engine keeps `version` for `sessions`, whose requests go there and nowhere else. Bounded by an evaluation's rollouts.

    While another engine is out of quarantine, requests of other sessions go to the others, and handovers too.
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self.engine: str | None = None
        """`None` while no engine out of quarantine serves the version; one may come back with it."""
        self.sessions: set[str] = set()
        self.over = asyncio.Event()
        """The evaluation has ended, or has to: the version was given up, or no engine serves it any more."""
        self.passable = asyncio.Event()
        """A newer version may come now: this is over, or there is another engine to take it."""

    def settle(self, healthy: Sequence[Candidate], *, newest: Version) -> None:
        """Stays on its engine while that serves the version; else goes on where it is served too. Without such an engine it is over
        as soon as a newer version than its own is known: whatever comes back then comes back with that."""
        same = [c for c in healthy if c.version == self.version]
        if not any(c.name == self.engine for c in same):
            self.engine = min(same, key=lambda c: c.tokens_in_flight).name if same and not self.over.is_set() else None
            if self.engine is None and newest > self.version:
                self.over.set()
        if self.over.is_set() or any(c.name != self.engine for c in healthy):
            self.passable.set()
        else:
            self.passable.clear()


class SharedPause:
    """Counts the owners of an engine's pause. The mode of the first stays in force until the last has resumed.

    Without it an operator's `continue_generation` would set an engine going in the middle of a commit, and a commit's
    resume would end an operator's pause.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._owners: set[str] = set()
        self._mode: PauseMode | None = None
        self._turn = asyncio.Lock()
        self._is_detached = False

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(sorted(self._owners))

    async def pause(self, owner: str, mode: PauseMode) -> None:
        """Returns when the engine is paused for `owner` too. Waits for a pause or resume under way and for the engine."""
        async with self._turn:
            self._owners.add(owner)
            if self._mode is None:
                await self.engine.pause(mode)
                self._mode = mode

    async def renew(self) -> None:
        """Says again that it is paused, where it is: an engine that hears no more of a pause may end it by itself."""
        if self._mode is not None and not self._turn.locked():
            async with self._turn:
                await self.engine.pause(self._mode)

    async def resume(self, owner: str) -> None:
        """Ends this owner's pause; the engine resumes if no other owner pauses it. Idempotent. Waits as `pause` does. `EngineUnavailable`
        where it was detached meanwhile."""
        async with self._turn:
            self._owners.discard(owner)
            if not self._owners:
                self._mode = None
                await self.engine.resume()
        if self._is_detached:
            raise EngineUnavailable(f"engine {self.engine.name} was detached")

    def detach(self) -> None:
        """Nobody is told from now on that the engine goes on: its name may be another's."""
        self._is_detached = True
        self.abandon()

    def abandon(self) -> None:
        """The engine is in quarantine: every pause of it ends here. Before it is readmitted it must be made to run again."""
        self._owners.clear()
        self._mode = None


class OwnedEngine:
    """An engine as one owner sees it: `ports.Engine`, with pauses counted by owner."""

    def __init__(self, shared: SharedPause, owner: str) -> None:
        self._shared = shared
        self._engine = shared.engine
        self._owner = owner

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._engine.generate(request)

    async def abort(self, request_id: str | None) -> None:
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._shared.pause(self._owner, mode)

    async def resume(self) -> None:
        await self._shared.resume(self._owner)

    async def stage(self, manifest: WeightManifest) -> None:
        await self._engine.stage(manifest)

    async def commit(self, version: Version) -> Attestation:
        return await self._engine.commit(version)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def renew(self) -> None:
        """Beyond the port: says again that a pause in force is still wanted."""
        await self._shared.renew()
