"""Which request goes to which engine: named holds, the line before the engines, the choice among
them, places there, a reservation.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Generic, TypeAlias, TypeVar

from midflight.allowance import Allowance
from midflight.errors import EngineUnavailable
from midflight.gateway.fleet.pauses import SharedPause
from midflight.ports import Engine
from midflight.types import Version

T = TypeVar("T")


class Holds:
    """Named holds, of all engines or of one. Synchronous. An engine is free when there is no hold
    of it and none of all engines.
    """

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
        return bool(self._all) or self.held_alone(engine)

    def held_alone(self, engine: str) -> bool:
        """Whether anybody holds it by its name."""
        return engine in self._one

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
    """Requests waiting for a place, in order of their tickets. A resumed request keeps its ticket,
    so it goes first.

    No request overtakes another: a place is offered to the first in line, and a new request stands
    behind all older tickets. Bounded by the requests that the gateway admits.
    """

    def __init__(self) -> None:
        self._waiters: list[tuple[int, int, _Waiter[T]]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(
        self,
        ticket: int,
        choose: Callable[[], T | None],
        *,
        give_back: Callable[[T], None],
        allowance: Allowance,
    ) -> T:
        """Waits until `choose` finds a place and every older ticket has one; woken by `serve`,
        ended by the allowance too.

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
        """Offers places from the front until one finds none. To be called after every change that
        may make a place.
        """
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
"""Engines with at most this multiple of the lightest load count as equally loaded; among them the
newest version is taken. Below the 1.3 within which the load must stay even."""

_CROWDED = 1.25
"""A session leaves its engine when that has this multiple of the mean load. Sessions differ so much
in length that affinity alone leaves the heaviest of eight engines at 1.8 times the mean; between
this and 1.3 there is room for requests on their way."""

_Entry: TypeAlias = tuple[bool, int, int, str]
"""Of an engine: whether its slots are full, load, order, name."""

_MAX_PINS = 20_000
"""Twice the sessions a gateway admits by default. Forgetting the oldest costs that session its
prefix cache, nothing else.
"""


class Loads:
    """Engines that requests may go to, by version and load. Synchronous.

    Of each version a sorted line is kept, and a fleet serves two or three at most, so what a change
    or a choice takes hardly grows with the number of engines.
    """

    def __init__(self) -> None:
        self._lines: dict[Version, list[_Entry]] = {}
        """Rising."""
        self._places: dict[str, tuple[Version, _Entry]] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._places)

    def put(
        self, engine: str, *, version: Version, load: int, order: int, full: bool = False
    ) -> None:
        """`load`: prompt tokens plus output budget of the requests there. It may be in already. Of
        equal engines the one of lower `order` is taken. `full`: it has a request for each of its
        slots, so that one more would wait."""
        self.drop(engine)
        entry = (full, load, order, engine)
        self._places[engine] = version, entry
        bisect.insort(self._lines.setdefault(version, []), entry)
        self._total += load

    def add(self, engine: str, tokens: int, *, full: bool = False) -> None:
        """It has so many more than before; fewer where they are negative."""
        version, entry = self._places[engine]
        line = self._lines[version]
        changed = (full, entry[1] + tokens, *entry[2:])
        del line[bisect.bisect_left(line, entry)]
        bisect.insort(line, changed)
        self._places[engine] = version, changed
        self._total += tokens

    def drop(self, engine: str) -> None:
        """No request may go there."""
        if (place := self._places.pop(engine, None)) is None:
            return
        version, entry = place
        line = self._lines[version]
        del line[bisect.bisect_left(line, entry)]
        if not line:
            del self._lines[version]
        self._total -= entry[1]

    def choose(self, *, pinned: str | None, tokens: int = 0) -> str | None:
        """The pinned engine if it is in and not crowded; else the newest version among the least
        loaded, the lightest first. Of those with a free slot, where one has.

        `tokens` is the load the request brings: to move it costs a prefill of that size at most, so
        a smaller difference moves nobody. `None` if no engine is in.
        """
        if not self._places:
            return None
        least = (
            next(iter(self._lines.values()))[0]
            if len(self._lines) == 1
            else min([line[0] for line in self._lines.values()])
        )
        full, lightest = least[:2]
        if pinned in self._places and not self._is_crowded(pinned, spare=lightest + tokens):
            return pinned
        if len(self._lines) == 1:
            return least[3]
        newest = max(
            version
            for version, line in self._lines.items()
            if line[0][0] == full and line[0][1] <= lightest * _NEAR
        )
        return self._lines[newest][0][3]

    def _is_crowded(self, engine: str, *, spare: int) -> bool:
        return self._places[engine][1][1] > max(spare, _CROWDED * self._total / len(self._places))


class Lease:
    """A request's place on an engine, until `Fleet.leave`. When the engine is lost its wait is cut
    and `lost` says why.
    """

    def __init__(
        self, member: Member, *, tokens: int, allowance: Allowance, evaluates: bool
    ) -> None:
        self.engine = member.shared.engine
        self.evaluates = evaluates
        """Whether it is of a session that the engine is reserved for."""
        self.version = member.version
        """What the engine had attested when the request was placed: none of its tokens can be
        older.
        """
        self.tokens = tokens
        self.allowance = allowance
        self.lost: BaseException | None = None
        self.moved = False
        """Nothing is wrong with engine or request: it goes on elsewhere."""
        self._member = member
        member.leases[self] = None
        member.load(tokens)

    @property
    def may_be_queued(self) -> bool:
        """The engine has more requests than it can serve at once: this one may be among those that
        wait inside it.
        """
        return self._member.is_crowded

    def lose(self, error: BaseException) -> None:
        """Idempotent: a second cut would end a wait that is none of this lease's."""
        if self.lost is None:
            self.lost = error
            self.allowance.cut()

    def move(self, why: str) -> None:
        """It goes on elsewhere, with the tokens that it has."""
        self.moved = True
        self.lose(EngineUnavailable(f"{self.engine.name} {why}"))

    def end(self) -> None:
        """Idempotent."""
        member = self._member
        if self in member.leases:
            del member.leases[self]
            member.load(-self.tokens)
            if member.emptied is not None and not member.leases:
                member.emptied.set()


class Member:
    """An attached engine. Its version is the last it attested."""

    def __init__(
        self,
        engine: Engine,
        version: Version,
        error: BaseException | None,
        *,
        loads: Loads,
        order: int,
    ) -> None:
        """`loads` is told of its load while it is in there; `order` is that of its arrival."""
        self._loads = loads
        self.order = order
        self.shared = SharedPause(engine)
        self.version = version
        self.error = error
        self.is_new = error is not None
        """It has attested nothing yet."""
        self.on_probation = False
        self.leases: dict[Lease, None] = {}
        self.tokens_in_flight = 0
        self.num_queued = 0
        """Requests that wait inside it, as of its last reading."""
        self.is_in = False
        """Whether it is in `loads`."""
        self.serves: Version | None = None
        """What it counts with among those that serve training."""
        self.emptied: asyncio.Event | None = None
        """Set with the end of its last request, where somebody waits for that."""

    @property
    def name(self) -> str:
        return self.shared.engine.name

    @property
    def _is_full(self) -> bool:
        return len(self.leases) >= self.shared.engine.capabilities.max_running

    @property
    def is_crowded(self) -> bool:
        return self.num_queued > 0 or len(self.leases) > self.shared.engine.capabilities.max_running

    def load(self, tokens: int) -> None:
        """So many tokens come, or go where they are negative."""
        self.tokens_in_flight += tokens
        if self.is_in:
            self._loads.add(self.shared.engine.name, tokens, full=self._is_full)

    def stand(self, *, takes: bool) -> None:
        """Whether requests may go there, as far as it alone decides."""
        if takes:
            self._loads.put(
                self.name,
                version=self.version,
                load=self.tokens_in_flight,
                order=self.order,
                full=self._is_full,
            )
        elif self.is_in:
            self._loads.drop(self.name)
        self.is_in = takes


class Pins:
    """The engine that holds each session's prefix. Synchronous, bounded; the longest unused pin
    goes first.
    """

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
    """One engine keeps `version` for `sessions`, whose requests go there and nowhere else. Bounded
    by an evaluation's rollouts.

    While another engine is out of quarantine, requests of other sessions go to the others, and
    handovers too.
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self.engine: str | None = None
        """`None` while no engine out of quarantine serves the version; one may come back with
        it.
        """
        self.sessions: set[str] = set()
        self.over = asyncio.Event()
        """The evaluation has ended, or has to: the version was given up, or no engine serves it any
        more.
        """
        self.passable = asyncio.Event()
        """A newer version may come now: this is over, or there is another engine to take it."""

    def move(self, healthy: Iterable[Member], *, newest: Version) -> None:
        """Its engine does not serve the version any more: it goes on where that is served too.
        Without such an engine it is over as soon as a newer version than its own is known: whatever
        comes back then comes back with that."""
        same = [c for c in healthy if c.version == self.version]
        self.engine = (
            min(same, key=lambda c: c.tokens_in_flight).name
            if same and not self.over.is_set()
            else None
        )
        if self.engine is None and newest > self.version:
            self.over.set()

    def let_pass(self, *, others: bool) -> None:
        """`others`: whether another engine is out of quarantine."""
        if self.over.is_set() or others:
            self.passable.set()
        else:
            self.passable.clear()
