"""The engines behind the gateway: which serve what, which are held or in quarantine, and which request is where."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from midflight.errors import ConfigError, EngineUnavailable
from midflight.gateway.deadline import Deadline
from midflight.gateway.gate import Holds, Line
from midflight.gateway.pauses import OwnedEngine, SharedPause
from midflight.gateway.router import Candidate, Pins, choose
from midflight.ports import Engine, Observer
from midflight.types import Version


class Lease:
    """A request's place on an engine, until `Fleet.leave`. When the engine is lost its wait is cut and `lost` says why."""

    def __init__(self, member: _Member, *, tokens: int, deadline: Deadline) -> None:
        self.engine = member.shared.engine
        self.version = member.version
        """What the engine had attested when the request was placed: none of its tokens can be older."""
        self.tokens = tokens
        self.deadline = deadline
        self.lost: BaseException | None = None
        self._member = member
        member.leases[self] = None
        member.tokens_in_flight += tokens

    def lose(self, error: BaseException) -> None:
        self.lost = error
        self.deadline.cut()

    def end(self) -> None:
        """Idempotent."""
        if self in self._member.leases:
            del self._member.leases[self]
            self._member.tokens_in_flight -= self.tokens


class _Member:
    """An attached engine. Its version is the last it attested."""

    def __init__(self, engine: Engine, version: Version) -> None:
        self.shared = SharedPause(engine)
        self.version = version
        self.error: BaseException | None = None
        self.on_probation = False
        self.leases: dict[Lease, None] = {}
        self.tokens_in_flight = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the fleet knows of an engine, for health pages and metrics."""

    name: str
    version: Version
    error: BaseException | None
    """Why it is in quarantine, `None` if it is not."""
    on_probation: bool
    """In quarantine for silence or nonsense only: it may rejoin without a handover."""
    held_by: tuple[str, ...]
    paused_by: tuple[str, ...]
    num_requests: int
    tokens_in_flight: int


class Fleet:
    """Implements `ports.Fleet`. Synchronous but for `place`; bounded by attached engines, admitted requests and pins.

    Every change that may make an engine routable serves the line of waiting requests at once: there is no polling.
    """

    def __init__(self, *, observer: Observer | None = None) -> None:
        self.on_served: Callable[[Version], None] | None = None
        """Told whenever `served_version` has changed, by a commit, a quarantine or a rejoin; set by whose admission depends on it."""
        self._members: dict[str, _Member] = {}
        self._holds = Holds()
        self._line: Line[Lease] = Line()
        self._pins = Pins()
        self._observer = observer
        self._tickets = itertools.count()
        self._last_served: Version = 0

    # --- Members -----------------------------------------------------------------------------------------------------

    def attach(self, engine: Engine, *, version: Version = 0) -> None:
        """A new engine, routable at once; `version` is what it attested."""
        if engine.name in self._members:
            raise ConfigError(f"attaching engine {engine.name!r}: the name is taken. Give every engine a name of its own.")
        self._members[engine.name] = _Member(engine, version)
        self._changed()

    def detach(self, engine: str) -> None:
        """Forgets an engine; its requests are resumed elsewhere, or wait."""
        member = self._members.pop(engine, None)
        if member is None:
            return
        self._holds.forget(engine)
        self._lose(member, EngineUnavailable(f"engine {engine} was detached"))
        self._changed()

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
                on_probation=m.on_probation,
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
        return len(self._line)

    # --- Holds -------------------------------------------------------------------------------------------------------

    def hold(self, engine: str, owner: str) -> None:
        """An engine that was detached meanwhile is not an error, here and below: whoever acts on it may be late."""
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

    # --- Versions and quarantine -------------------------------------------------------------------------------------

    def served(self, engine: str, version: Version) -> None:
        member = self._members.get(engine)
        if member is None:
            return
        rejoined = member.error is not None
        member.version, member.error, member.on_probation = version, None, False
        self._changed()
        if rejoined and self._observer is not None:
            self._observer.engine_rejoined(engine=engine, version=version)

    def rejoin(self, engine: str, version: Version) -> bool:
        """Ends a probation, if the engine is (still) on probation and serves what the fleet serves. Says whether it did."""
        member = self._members.get(engine)
        if member is None or not member.on_probation or version != self.current_version():
            return False
        self.served(engine, version)
        return True

    def quarantine(self, engine: str, error: BaseException, *, probation: bool = False) -> None:
        """`probation`: nothing is known against its weights, so `HealthWatch` may let it rejoin; otherwise only `served` does.

        The first error is kept, unless one that allows no probation comes after one that does. Pauses of the engine end here.
        """
        member = self._members.get(engine)
        if member is None:
            return
        newly = member.error is None
        if newly or (member.on_probation and not probation):
            member.error, member.on_probation = error, probation
        member.shared.abandon()
        if newly:
            self._lose(member, error)
            self._changed()
            if self._observer is not None:
                self._observer.engine_quarantined(engine=engine, error=f"{type(error).__name__}: {error}")

    def served_version(self) -> Version:
        """Held engines count (they come back). While all are in quarantine: the last one known."""
        versions = [m.version for m in self._members.values() if m.error is None]
        self._last_served = min(versions, default=self._last_served)
        return self._last_served

    def current_version(self) -> Version:
        """The newest version that an engine out of quarantine serves, else that any engine served."""
        members = self._members.values()
        return max((m.version for m in members if m.error is None), default=max((m.version for m in members), default=self._last_served))

    # --- Requests ----------------------------------------------------------------------------------------------------

    def ticket(self) -> int:
        """A place in the order of arrival; older tickets are dispatched first."""
        return next(self._tickets)

    async def place(self, ticket: int, *, tokens: int, affinity: str, deadline: Deadline) -> Lease:
        """Waits for a routable engine, in order of tickets; woken by attach, release and rejoin, ended by the deadline.

        `tokens` is the load the request brings: prompt plus output budget. The deadline stands while engines are held.
        """
        if self._only_held():
            deadline.stop()
        return await self._line.wait(
            ticket,
            lambda: self._lease(tokens=tokens, affinity=affinity, deadline=deadline),
            give_back=self.leave,
            deadline=deadline,
        )

    def leave(self, lease: Lease) -> None:
        """The request has ended on its engine. Idempotent."""
        lease.end()
        lease.deadline.start()

    def forget(self, affinity: str) -> None:
        """The session is over."""
        self._pins.forget(affinity)

    def describe(self) -> str:
        """Each engine and why it takes no request, for error messages."""
        return "; ".join(_describe(state) for state in self.states()) or "no engine is attached"

    # --- State -------------------------------------------------------------------------------------------------------

    def _is_routable(self, engine: str) -> bool:
        return self._members[engine].error is None and not self._holds.owners(engine)

    def _candidates(self) -> list[Candidate]:
        return [Candidate(name, m.version, m.tokens_in_flight, routable=self._is_routable(name)) for name, m in self._members.items()]

    def _lease(self, *, tokens: int, affinity: str, deadline: Deadline) -> Lease | None:
        """A place on the chosen engine, where the session stays. One whose engine is only held goes elsewhere once and keeps its pin."""
        pinned = self._pins.get(affinity)
        name = choose(self._candidates(), pinned=pinned, tokens=tokens)
        if name is None:
            return None
        if pinned is None or self._is_routable(pinned):
            self._pins.pin(affinity, name)
        deadline.start()
        return Lease(self._members[name], tokens=tokens, deadline=deadline)

    def _lose(self, member: _Member, error: BaseException) -> None:
        self._pins.forget_engine(member.shared.engine.name)
        for lease in member.leases:
            lease.lose(error)

    def _only_held(self) -> bool:
        """Whether a waiting request waits for a hold to end: time that no deadline counts."""
        healthy = [name for name, m in self._members.items() if m.error is None]
        return self._holds.shut or (bool(healthy) and all(self._holds.owners(name) for name in healthy))

    def _changed(self) -> None:
        """Serves the line, lets every deadline run or stand as the holds now say, and tells a new `served_version`."""
        before = self._last_served
        if self.served_version() != before and self.on_served is not None:
            self.on_served(self._last_served)
        self._line.serve()
        held = self._only_held()
        for deadline in self._line.deadlines():
            _run_or_stand(deadline, stands=held)
        for name, member in self._members.items():
            for lease in member.leases:
                _run_or_stand(lease.deadline, stands=bool(self._holds.owners(name)))


def _run_or_stand(deadline: Deadline, *, stands: bool) -> None:
    if stands:
        deadline.stop()
    else:
        deadline.start()


def _describe(state: EngineState) -> str:
    if state.error is not None:
        return f"{state.name} is in quarantine ({state.error})"
    if state.held_by:
        return f"{state.name} is held by {', '.join(state.held_by)}"
    return f"{state.name} serves version {state.version}"
