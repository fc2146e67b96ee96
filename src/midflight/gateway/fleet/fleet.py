"""The engines behind the gateway: which serve what, which are held or in quarantine, and which request is where."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from midflight.allowance import Allowance
from midflight.errors import ConfigError, EngineUnavailable
from midflight.gateway.fleet.routing import Candidate, Holds, OwnedEngine, Pins, Reservation, SharedPause, WaitingLine, choose
from midflight.ports import Engine
from midflight.types import Capabilities, Version
from midflight.types.facts import Quarantined, Record, Rejoined, unheard


class Lease:
    """A request's place on an engine, until `Fleet.leave`. When the engine is lost its wait is cut and `lost` says why."""

    def __init__(self, member: _FleetEngine, *, tokens: int, allowance: Allowance, evaluates: bool) -> None:
        self.engine = member.shared.engine
        self.evaluates = evaluates
        """Whether it is of a session that the engine is reserved for."""
        self.version = member.version
        """What the engine had attested when the request was placed: none of its tokens can be older."""
        self.tokens = tokens
        self.allowance = allowance
        self.lost: BaseException | None = None
        self._member = member
        member.leases[self] = None
        member.tokens_in_flight += tokens

    def lose(self, error: BaseException) -> None:
        """Idempotent: a second cut would end a wait that is none of this lease's."""
        if self.lost is None:
            self.lost = error
            self.allowance.cut()

    def end(self) -> None:
        """Idempotent."""
        member = self._member
        if self in member.leases:
            del member.leases[self]
            member.tokens_in_flight -= self.tokens
            if member.emptied is not None and not member.leases:
                member.emptied.set()


class _FleetEngine:
    """An attached engine. Its version is the last it attested."""

    def __init__(self, engine: Engine, version: Version, error: BaseException | None) -> None:
        self.shared = SharedPause(engine)
        self.version = version
        self.error = error
        self.is_new = error is not None
        """It has attested nothing yet."""
        self.on_probation = False
        self.leases: dict[Lease, None] = {}
        self.tokens_in_flight = 0
        self.emptied: asyncio.Event | None = None
        """Set with the end of its last request, where somebody waits for that."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the fleet knows of an engine, for health pages and metrics."""

    name: str
    version: Version
    error: BaseException | None
    """Why it is in quarantine, `None` if it is not."""
    is_new: bool
    """In quarantine since it was attached: it has yet to get the current weights."""
    on_probation: bool
    """In quarantine for silence or nonsense only: it may rejoin without a handover."""
    reserved: bool
    """Keeps its version for an evaluation, or has yet to catch up after it."""
    held_by: tuple[str, ...]
    paused_by: tuple[str, ...]
    num_requests: int
    tokens_in_flight: int


class Fleet:
    """Implements `ports.EngineFleet`. Synchronous but for `place`; bounded by attached engines, admitted requests and pins.

    Every change that may make an engine routable serves the line of waiting requests at once: there is no polling.
    """

    def __init__(self, *, record: Record = unheard) -> None:
        self.on_served: Callable[[Version], None] | None = None
        """Told whenever `served_version` has changed, by a commit, a quarantine or a rejoin; set by the part whose admission depends on it."""
        self.on_changed: Callable[[], None] | None = None
        """Told after every change that may be one of who takes requests."""
        self._members: dict[str, _FleetEngine] = {}
        self._holds = Holds()
        self._lines: dict[bool, WaitingLine[Lease]] = {evaluates: WaitingLine() for evaluates in (False, True)}
        """One for requests of evaluations, whose engine is another: neither kind waits behind the other."""
        self._reserved: Reservation | None = None
        self._pins = Pins()
        self._record = record
        self._tickets = itertools.count()
        self._last_served: Version = 0

    # --- Members -----------------------------------------------------------------------------------------------------

    def attach(self, engine: Engine, *, version: Version = 0, error: BaseException | None = None) -> None:
        """A new engine, routable at once; `version` is what it attested. With an `error` it has attested nothing, and is in quarantine from
        its first moment: nothing but `served` makes it routable (I2, I7)."""
        if engine.name in self._members:
            raise ConfigError(f"attaching engine {engine.name!r}: the name is taken. Give every engine a name of its own.")
        self._members[engine.name] = _FleetEngine(engine, version, error)
        self._changed()

    def detach(self, engine: str) -> int:
        """Forgets an engine; its requests, whose number is returned, are resumed elsewhere, or wait. What a handover still does to it
        fails, so that nothing is said of a successor that has its name."""
        member = self._members.pop(engine, None)
        if member is None:
            return 0
        lost = len(member.leases)
        self._holds.forget(engine)
        member.shared.detach()
        self._lose(member, EngineUnavailable(f"engine {engine} was detached"))
        if member.emptied is not None:
            member.emptied.set()
        self._changed()
        return lost

    async def emptied(self, engine: str) -> None:
        """Waits for the ends of its requests, for one caller; ended by the last of them, or when it is detached. New ones are for `hold` to
        keep away."""
        member = self._members.get(engine)
        if member is not None and member.leases:
            member.emptied = asyncio.Event()
            await member.emptied.wait()

    def engines(self) -> tuple[Engine, ...]:
        """All attached engines as the handover sees them: its pauses and the operator's do not end each other."""
        return self.engines_of("handover")

    def engines_of(self, owner: str) -> tuple[OwnedEngine, ...]:
        """All attached engines, those in quarantine too, with pauses counted for `owner`."""
        return tuple(OwnedEngine(member.shared, owner) for member in self._members.values())

    def states(self) -> tuple[EngineState, ...]:
        return tuple(
            EngineState(
                name=name,
                version=m.version,
                error=m.error,
                is_new=m.is_new,
                on_probation=m.on_probation,
                reserved=self._keeps(name),
                held_by=self._holds.owners(name),
                paused_by=m.shared.owners,
                num_requests=len(m.leases),
                tokens_in_flight=m.tokens_in_flight,
            )
            for name, m in self._members.items()
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an engine."""
        return sum(len(line) for line in self._lines.values())

    # --- Holds -------------------------------------------------------------------------------------------------------

    def hold(self, engine: str, owner: str) -> None:
        """An engine that was detached meanwhile is not an error, here and below: the caller may be late."""
        if engine in self._members:
            self._holds.hold(owner, engine)
            self._changed()

    def release(self, engine: str, owner: str) -> None:
        self._holds.release(owner, engine)
        self._changed()

    def hold_all(self, owner: str) -> None:
        """Holds every engine, those attached later too."""
        self._holds.hold(owner)
        self._changed()

    def release_all(self, owner: str) -> None:
        self._holds.release(owner)
        self._changed()

    # --- An engine reserved for an evaluation ------------------------------------------------------------------------

    def reserve(self, version: Version) -> Reservation:
        """Keeps an engine that serves this version there, until `unreserve`. One reservation at a time."""
        assert self._reserved is None, f"version {self._reserved.version} is reserved already"
        reserved = self._reserved = Reservation(version)
        self._changed()
        return reserved

    def unreserve(self, reserved: Reservation) -> None:
        """The evaluation is over; idempotent. If others serve a newer version by now, its engine stays apart until it does too."""
        reserved.over.set()
        self._changed()

    def reserved(self) -> str | None:
        """The engine that no handover may touch now."""
        return None if self._reserved is None or self._reserved.over.is_set() else self._reserved.engine

    # --- Versions and quarantine -------------------------------------------------------------------------------------

    def served(self, engine: str, version: Version) -> None:
        member = self._members.get(engine)
        if member is None:
            return
        rejoined = member.error is not None
        member.version, member.error, member.on_probation, member.is_new = version, None, False, False
        self._changed()
        if rejoined:
            self._record(Rejoined(engine, version))

    def rejoin(self, engine: str, version: Version) -> bool:
        """Ends a probation, if the engine is (still) on probation and serves what the fleet serves. Says whether it did."""
        member = self._members.get(engine)
        if member is None or not member.on_probation or version != self.current_version():
            return False
        self.served(engine, version)
        return True

    def quarantine(self, engine: str, error: BaseException, *, probation: bool = False) -> None:
        """`probation`: nothing is known against its weights, so `HealthWatch` may let it rejoin; otherwise only `served` does.

        The first error is kept, unless one that allows no probation comes after one that does, or after having just joined. Pauses of the
        engine end here.
        """
        member = self._members.get(engine)
        if member is None:
            return
        newly = member.error is None
        if newly or ((member.on_probation or member.is_new) and not probation):
            member.error, member.on_probation = error, probation
        member.shared.abandon()
        if newly:
            self._lose(member, error)
            self._changed()
            self._record(Quarantined(engine, f"{type(error).__name__}: {error}"))

    def served_version(self) -> Version:
        """Held engines count (they come back), a reserved one does not. While no engine counts: the last one known."""
        versions = [m.version for name, m in self._members.items() if m.error is None and not self._keeps(name)]
        self._last_served = min(versions, default=self._last_served)
        return self._last_served

    def current_version(self) -> Version:
        """The newest version that an engine out of quarantine and not reserved serves, else that any engine served."""
        serving = (m.version for name, m in self._members.items() if m.error is None and not self._keeps(name))
        return max(serving, default=max((m.version for m in self._members.values()), default=self._last_served))

    # --- Requests ----------------------------------------------------------------------------------------------------

    def takers(self, *, evaluates: bool) -> list[Capabilities]:
        """Of the engines that requests of training, or of an evaluation, may go to; where none is reserved for evaluations, of all."""
        kind = evaluates and self._reserved is not None
        return [self._members[name].shared.engine.capabilities for name in self._takers(kind)]

    def shares_evaluations(self) -> bool:
        """Whether some engine takes requests of both kinds."""
        return self._reserved is not None and self._reserved.engine in self._takers(False)

    def ticket(self) -> int:
        """A place in the order of arrival; older tickets are dispatched first."""
        return next(self._tickets)

    async def place(self, ticket: int, *, tokens: int, affinity: str, allowance: Allowance) -> Lease:
        """Waits for a routable engine, in order of tickets; woken by attach, release and rejoin, ended when the seconds are spent.

        `tokens` is the load the request brings: prompt plus output budget. The allowance stands while engines are held.
        """
        evaluates = self._reserved is not None and affinity in self._reserved.sessions
        if self._only_held(evaluates):
            allowance.stop()
        return await self._lines[evaluates].wait(
            ticket,
            lambda: self._lease(tokens=tokens, affinity=affinity, allowance=allowance, evaluates=evaluates),
            give_back=self.leave,
            allowance=allowance,
        )

    def leave(self, lease: Lease) -> None:
        """The request has ended on its engine. Idempotent."""
        lease.end()
        lease.allowance.start()

    def forget(self, affinity: str) -> None:
        """The session is over."""
        self._pins.forget(affinity)

    def describe(self) -> str:
        """Each engine and why it takes no request, for error messages."""
        return "; ".join(_describe(state) for state in self.states()) or "no engine is attached"

    # --- State -------------------------------------------------------------------------------------------------------

    def _keeps(self, engine: str) -> bool:
        """Whether it keeps its version for an evaluation, or has yet to catch up."""
        return self._reserved is not None and self._reserved.engine == engine

    def _takers(self, evaluates: bool) -> list[str]:
        """Engines out of quarantine that such requests may go to. A reserved one alone is shared: but never while it is behind
        `served_version`, because tokens older than that would break admission's count (I2)."""
        healthy = [name for name, m in self._members.items() if m.error is None]
        if evaluates:
            return [name for name in healthy if self._keeps(name)]
        others = [name for name in healthy if not self._keeps(name)]
        return others or [name for name in healthy if self._members[name].version >= self._last_served]

    def _is_routable(self, engine: str) -> bool:
        return self._members[engine].error is None and not self._holds.held(engine)

    def _candidates(self, takers: Collection[str]) -> list[Candidate]:
        return [
            Candidate(name, m.version, m.tokens_in_flight, routable=name in takers and self._is_routable(name))
            for name, m in self._members.items()
        ]

    def _lease(self, *, tokens: int, affinity: str, allowance: Allowance, evaluates: bool) -> Lease | None:
        """A place on the chosen engine, where the session stays. One whose engine is only held goes elsewhere once and keeps its pin."""
        pinned = self._pins.get(affinity)
        name = choose(self._candidates(self._takers(evaluates)), pinned=pinned, tokens=tokens)
        if name is None:
            return None
        if pinned is None or self._is_routable(pinned):
            self._pins.pin(affinity, name)
        allowance.start()
        return Lease(self._members[name], tokens=tokens, allowance=allowance, evaluates=evaluates)

    def _lose(self, member: _FleetEngine, error: BaseException) -> None:
        self._pins.forget_engine(member.shared.engine.name)
        for lease in member.leases:
            lease.lose(error)

    def _only_held(self, evaluates: bool) -> bool:
        """Whether such a request waits for a hold to end: time that no deadline counts."""
        if self._holds.none or self._holds.shut:
            return self._holds.shut
        takers = self._takers(evaluates)
        return bool(takers) and all(self._holds.held(name) for name in takers)

    def _changed(self) -> None:
        """Serves the lines, lets every allowance run or stand as the holds now say, and tells a new `served_version`."""
        self._settle_reservation()
        before = self._last_served
        if self.served_version() != before and self.on_served is not None:
            self.on_served(self._last_served)
        self._leave_behind()
        for evaluates, line in self._lines.items():
            line.serve()
            held = self._only_held(evaluates)
            for allowance in line.allowances():
                _run_or_stand(allowance, stands=held)
        for name, member in self._members.items():
            for lease in member.leases:
                _run_or_stand(lease.allowance, stands=self._holds.held(name))
        if self.on_changed is not None:
            self.on_changed()

    def _settle_reservation(self) -> None:
        """It ends when it is over and its engine is one of the others again, or fell out."""
        reserved = self._reserved
        if reserved is None:
            return
        healthy = [c for c in self._candidates(self._members) if self._members[c.name].error is None]
        reserved.settle(healthy, newest=self.current_version())
        if reserved.over.is_set() and (reserved.engine is None or reserved.version >= self.current_version()):
            self._reserved = None

    def _leave_behind(self) -> None:
        """Requests that ran on the engine when it was reserved go on elsewhere once it is behind: its tokens are too old now (I2)."""
        for name, member in self._members.items():
            if self._keeps(name) and member.version < self._last_served:
                for lease in member.leases:
                    if not lease.evaluates:
                        lease.lose(EngineUnavailable(f"{name} keeps version {member.version} for an evaluation"))


def _run_or_stand(allowance: Allowance, *, stands: bool) -> None:
    if stands:
        allowance.stop()
    else:
        allowance.start()


def _describe(state: EngineState) -> str:
    if state.error is not None:
        return f"{state.name} is in quarantine ({state.error})"
    if state.held_by:
        return f"{state.name} is held by {', '.join(state.held_by)}"
    return f"{state.name} serves version {state.version}" + (", for an evaluation alone" if state.reserved else "")
