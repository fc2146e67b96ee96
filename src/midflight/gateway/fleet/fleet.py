"""The fleet: all engines behind the gateway, with their versions, holds, quarantines and
requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from midflight.allowance import Allowance
from midflight.errors import ConfigError, EngineUnavailable
from midflight.gateway.fleet.holds import Holds
from midflight.gateway.fleet.leases import Lease, Member
from midflight.gateway.fleet.pauses import OwnedEngine
from midflight.gateway.fleet.reservation import Reservation
from midflight.gateway.fleet.routing import Loads, Pins
from midflight.gateway.fleet.waiting_line import WaitingLine
from midflight.ports import Engine
from midflight.types import Capabilities, Version
from midflight.types.facts import Quarantined, Record, Rejoined, record_nothing


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of one engine, for health pages and metrics."""

    name: str
    version: Version
    error: BaseException | None
    """The reason for its quarantine. `None` if it is not in quarantine."""
    is_new: bool
    """True if it has been in quarantine since it was attached. It has yet to get the current
    weights.
    """
    on_probation: bool
    """True if it is in quarantine only for silence or nonsense. It may rejoin without a
    handover.
    """
    reserved: bool
    """True if it keeps its version for an evaluation, or has yet to catch up after one."""
    held_by: tuple[str, ...]
    paused_by: tuple[str, ...]
    num_requests: int
    tokens_in_flight: int


class Fleet:
    """Implements `ports.EngineFleet`. Synchronous, except for `place` and `emptied`. Bounded by
    attached engines, admitted requests and pins.

    Every change that may make an engine routable serves the waiting requests at once, so there is
    no polling.
    """

    def __init__(self, *, record: Record = record_nothing, come_back: bool = False) -> None:
        """With `come_back` the process that starts the engines restarts them when they die, and
        ends this process if it cannot. Then a request's time is stopped while no engine takes it.
        """
        self._come_back = come_back
        self.on_served: Callable[[Version], None] | None = None
        """Called whenever `served_version` has changed by a commit, a quarantine or a rejoin. The
        part whose admission depends on it sets this.
        """
        self.on_changed: Callable[[], None] | None = None
        """Called after every change that may affect which engines take requests."""
        self.on_any: Callable[[], None] | None = None
        """Called after every change of an engine."""
        self.on_outage: Callable[[bool], None] | None = None
        """Called with true when no engine takes requests of training any more, because all are
        held, in quarantine or gone. Called with false when an engine takes them again.
        """
        self._members: dict[str, Member] = {}
        self._loads = Loads()
        """The loads of the engines that take requests of training: those out of quarantine, not
        reserved, and not held by name.
        """
        self._serving = Counter[Version]()
        """The number of engines that serve each version. Engines in quarantine and reserved engines
        do not count.
        """
        self._stands = dict.fromkeys((False, True), False)
        """True if the allowances of each line are stopped."""
        self._holds = Holds()
        self._lines: dict[bool, WaitingLine[Lease]] = {
            evaluates: WaitingLine() for evaluates in (False, True)
        }
        """The requests of evaluations have a line of their own, because their engine is another
        one. So neither kind waits behind the other.
        """
        self._reserved: Reservation | None = None
        self._pins = Pins()
        self.lent: str | None = None
        """The engine that serves only at times, and therefore keeps no version for an
        evaluation.
        """
        self._record = record
        self._tickets = itertools.count()
        self._orders = itertools.count()
        self._last_served: Version = 0
        self._takes = True

    # --- Members ----------------------------------------------------------------------------------

    def attach(
        self, engine: Engine, *, version: Version = 0, error: BaseException | None = None
    ) -> None:
        """Adds a new engine, which is routable at once. `version` is the version that it attested.
        With an `error` it has attested nothing and is in quarantine from its first moment; only
        `served` makes it routable (I2, I7).
        """
        if engine.name in self._members:
            raise ConfigError(
                f"attaching engine {engine.name!r}: the name is taken. Give every engine a name of "
                "its own."
            )
        self._members[engine.name] = Member(
            engine, version, error, loads=self._loads, order=next(self._orders)
        )
        self._changed(engine.name)

    def detach(self, engine: str) -> int:
        """Forgets an engine and returns the number of its requests, which are resumed elsewhere or
        wait. Calls that a handover still makes to it fail, so that their outcome is not taken for
        that of a successor with the same name.
        """
        member = self._members.pop(engine, None)
        if member is None:
            return 0
        lost = len(member.leases)
        self._count(member, None)
        member.stand(takes=False)
        self._holds.forget(engine)
        member.shared.detach()
        self._lose(member, EngineUnavailable(f"engine {engine} was detached"))
        if member.emptied is not None:
            member.emptied.set()
        self._changed()
        return lost

    async def emptied(self, engine: str) -> None:
        """Waits until the last request of an engine has ended, or the engine is detached. Only one
        caller may wait. New requests must be kept away by `hold`.
        """
        member = self._members.get(engine)
        if member is not None and member.leases:
            member.emptied = asyncio.Event()
            await member.emptied.wait()

    def engines(self) -> tuple[Engine, ...]:
        """All attached engines as the handover sees them. Its pauses and the operator's pauses do
        not end each other.
        """
        return self.engines_of("handover")

    def engines_of(self, owner: str) -> tuple[OwnedEngine, ...]:
        """All attached engines, including those in quarantine, with pauses counted for `owner`."""
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

    # --- Holds ------------------------------------------------------------------------------------

    def hold(self, engine: str, owner: str) -> None:
        """Holds an engine. Here and below, an engine that was detached meanwhile is not an error,
        because the caller may be late.
        """
        if engine in self._members:
            self._holds.hold(owner, engine)
            self._changed(engine)

    def release(self, engine: str, owner: str) -> None:
        self._holds.release(owner, engine)
        self._changed(engine)

    def hold_all(self, owner: str) -> None:
        """Holds every engine, those attached later too."""
        self._holds.hold(owner)
        self._changed(*self._members)

    def release_all(self, owner: str) -> None:
        self._holds.release(owner)
        self._changed(*self._members)

    def leases(self, engine: str) -> tuple[Lease, ...]:
        """The requests that are on an engine, the oldest first."""
        if engine not in self._members:
            return ()
        return tuple(self._members[engine].leases)

    # --- An engine reserved for an evaluation -----------------------------------------------------

    def reserve(self, version: Version) -> Reservation:
        """Keeps an engine that serves this version there, until `unreserve`. One reservation at a
        time.
        """
        assert self._reserved is None, f"version {self._reserved.version} is reserved already"
        reserved = Reservation(version)
        self._reserved = reserved
        self._changed()
        return reserved

    def unreserve(self, reserved: Reservation) -> None:
        """The evaluation is over. Idempotent. If other engines serve a newer version by now, the
        engine takes no other requests until it serves that too.
        """
        reserved.over.set()
        self._changed()

    def reserved(self) -> str | None:
        """The engine that no handover may touch now."""
        if self._reserved is None or self._reserved.over.is_set():
            return None
        return self._reserved.engine

    # --- Versions and quarantine ------------------------------------------------------------------

    def served(self, engine: str, version: Version) -> None:
        """The engine has attested this version, which ends its quarantine."""
        member = self._members.get(engine)
        if member is None:
            return
        rejoined = member.error is not None
        member.version = version
        member.error = None
        member.on_probation = False
        member.is_new = False
        self._changed(engine)
        if rejoined:
            self._record(Rejoined(engine, version))

    def rejoin(self, engine: str, version: Version) -> bool:
        """Ends a probation, if the engine is still on probation and serves the fleet's current
        version. Returns whether it did.
        """
        member = self._members.get(engine)
        if member is None or not member.on_probation or version != self.current_version():
            return False
        self.served(engine, version)
        return True

    def quarantine(self, engine: str, error: BaseException, *, probation: bool = False) -> None:
        """Puts an engine in quarantine, which ends its pauses. With `probation` nothing is known
        against its weights, so `HealthWatch` may let it rejoin. Otherwise only `served` ends the
        quarantine.

        The first error is kept. A later error replaces it only if it allows no probation and the
        engine is on probation or new.
        """
        member = self._members.get(engine)
        if member is None:
            return
        newly = member.error is None
        if newly or ((member.on_probation or member.is_new) and not probation):
            member.error = error
            member.on_probation = probation
        member.shared.abandon()
        if newly:
            self._lose(member, error)
            self._changed(engine)
            self._record(Quarantined(engine, f"{type(error).__name__}: {error}"))

    def served_version(self) -> Version:
        """The oldest version that an engine serves. Held engines count, because they come back; a
        reserved one does not. While no engine counts, the last known version.
        """
        self._last_served = min(self._serving, default=self._last_served)
        return self._last_served

    def current_version(self) -> Version:
        """The newest version that an engine out of quarantine and not reserved serves. If there is
        no such engine, it is the newest version that any engine served.
        """
        if self._serving:
            return max(self._serving)
        return max((m.version for m in self._members.values()), default=self._last_served)

    def read(self, engine: str, *, num_queued: int) -> None:
        """Notes how many requests wait inside an engine."""
        member = self._members.get(engine)
        if member is not None:
            member.num_queued = num_queued

    # --- Requests ---------------------------------------------------------------------------------

    def takers(self, *, evaluates: bool) -> list[Capabilities]:
        """The capabilities of the engines that requests of training, or of an evaluation, may go
        to. If no engine is reserved, evaluations go to the same engines as training.
        """
        evaluates = evaluates and self._reserved is not None
        if evaluates or not self._serving:
            takers = [self._kept_takes(evaluates=evaluates)]
        else:
            takers = [member for member in self._members.values() if member.serves is not None]
        return [member.shared.engine.capabilities for member in takers if member is not None]

    def shares_evaluations(self) -> bool:
        """True if some engine takes requests of both kinds."""
        return not self._serving and self._kept_takes(evaluates=False) is not None

    def ticket(self) -> int:
        """A place in the order of arrival; older tickets are dispatched first."""
        return next(self._tickets)

    async def place(
        self, ticket: int, *, tokens: int, affinity: str, allowance: Allowance
    ) -> Lease:
        """Waits for a routable engine, in order of tickets. Attach, release and rejoin wake the
        wait; it ends when the allowance's seconds are spent.

        `tokens` is the load that the request brings: prompt plus output budget. The allowance is
        stopped while engines are held.
        """
        evaluates = self._reserved is not None and affinity in self._reserved.sessions
        if self._only_held(evaluates):
            allowance.stop()
        return await self._lines[evaluates].wait(
            ticket,
            lambda: self._lease(
                tokens=tokens, affinity=affinity, allowance=allowance, evaluates=evaluates
            ),
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
        """Describes each engine and the reason why it takes no request, for error messages."""
        return "; ".join(_describe(state) for state in self.states()) or "no engine is attached"

    # --- State ------------------------------------------------------------------------------------

    def _keeps(self, engine: str) -> bool:
        """True if the engine keeps its version for an evaluation, or has yet to catch
        up after one.
        """
        return self._reserved is not None and self._reserved.engine == engine

    def _kept_takes(self, *, evaluates: bool) -> Member | None:
        """The reserved engine, if requests of an evaluation (`evaluates`), or of training, may go
        to it. Requests of training may do so only if no other engine serves, and never while it is
        behind `served_version`, because tokens older than that would break admission's count
        (I2).
        """
        kept = self._reserved_member()
        if kept is None or kept.error is not None:
            return None
        if evaluates:
            return kept
        if self._serving or kept.version < self._last_served:
            return None
        return kept

    def _reserved_member(self) -> Member | None:
        if self._reserved is None or self._reserved.engine is None:
            return None
        return self._members.get(self._reserved.engine)

    def _lease(
        self, *, tokens: int, affinity: str, allowance: Allowance, evaluates: bool
    ) -> Lease | None:
        """A place on the chosen engine, to which the session is pinned. A session whose engine is
        only held goes elsewhere once and keeps its pin.
        """
        if self._holds.shut:
            return None
        pinned = self._pins.get(affinity)
        if self._serving and not evaluates:
            name = self._loads.choose(pinned=pinned, tokens=tokens)
        else:
            name = self._place_kept(evaluates)
        if name is None:
            return None
        if pinned is None or (
            self._members[pinned].error is None and not self._holds.held_alone(pinned)
        ):
            self._pins.pin(affinity, name)
        allowance.start()
        return Lease(self._members[name], tokens=tokens, allowance=allowance, evaluates=evaluates)

    def _place_kept(self, evaluates: bool) -> str | None:
        """The name of the reserved engine, if the request may go there now."""
        kept = self._kept_takes(evaluates=evaluates)
        if kept is None or self._holds.held_alone(kept.name):
            return None
        return kept.name

    def _lose(self, member: Member, error: BaseException) -> None:
        self._pins.forget_engine(member.shared.engine.name)
        for lease in member.leases:
            lease.lose(error)

    def _only_held(self, evaluates: bool) -> bool:
        """True if a request waits only for a hold to end, or for an engine to come back. No
        deadline counts that time.
        """
        if self._holds.shut:
            return True
        if not self._serving and self._kept_takes(evaluates=evaluates) is None:
            return self._come_back
        if self._holds.none:
            return False
        if self._serving and not evaluates:
            return not self._loads
        return (
            self._kept_takes(evaluates=evaluates) is not None
            and self._place_kept(evaluates) is None
        )

    def _changed(self, *engines: str) -> None:
        """These engines have changed. Serves the lines, starts or stops every allowance as
        `_only_held` now says, and reports a new `served_version` and changes in which engines take
        requests.
        """
        had_reservation = self._reserved is not None
        others = [self._enter(name) for name in engines]
        self._settle_reservation()
        before = self._last_served
        if self.served_version() != before and self.on_served is not None:
            self.on_served(self._last_served)
        self._leave_behind()
        for evaluates, line in self._lines.items():
            line.serve()
            held = self._only_held(evaluates)
            if held != self._stands[evaluates]:
                self._stands[evaluates] = held
                for allowance in line.allowances():
                    _run_or_stand(allowance, stands=held)
        for name in engines:
            if name not in self._members:
                continue
            for lease in self._members[name].leases:
                _run_or_stand(lease.allowance, stands=self._holds.held(name))
        self._tell_outage()
        is_reserved = had_reservation or self._reserved is not None
        if self.on_changed is not None and (is_reserved or any(others) or not engines):
            self.on_changed()
        if self.on_any is not None:
            self.on_any()

    def _tell_outage(self) -> None:
        """Calls `on_outage` if training has lost its last engine, or has one again."""
        if self._holds.shut:
            takes = False
        elif self._serving:
            takes = bool(self._loads)
        else:
            takes = self._place_kept(evaluates=False) is not None
        if takes != self._takes:
            self._takes = takes
            if self.on_outage is not None:
                self.on_outage(not takes)

    def _enter(self, name: str) -> bool:
        """Counts an engine by its present state. Returns whether it has begun or ceased to take
        requests of training.
        """
        member = self._members.get(name)
        if member is None:
            return False
        did = member.serves is not None
        serves = member.error is None and not self._keeps(name)
        self._count(member, member.version if serves else None)
        member.stand(takes=serves and not self._holds.held_alone(name))
        return did != serves

    def _count(self, member: Member, serves: Version | None) -> None:
        """Counts the engine with this version instead of the one before. With `None` the engine is
        counted no more.
        """
        if member.serves is not None:
            self._serving[member.serves] -= 1
            if not self._serving[member.serves]:
                del self._serving[member.serves]
        if serves is not None:
            self._serving[serves] += 1
        member.serves = serves

    def _settle_reservation(self) -> None:
        """Updates the reservation. It stays on its engine while that serves the version. It ends
        when it is over and its engine is lost, or has caught up with the others.
        """
        reserved = self._reserved
        if reserved is None:
            return
        home = reserved.engine
        kept = None if home is None else self._members.get(home)
        if kept is None or kept.error is not None or kept.version != reserved.version:
            steady = (m for m in self._members.values() if m.error is None and m.name != self.lent)
            reserved.move(steady, newest=self.current_version())
        others = [m for m in self._members.values() if m.name != reserved.engine]
        reserved.let_pass(others=any(member.error is None for member in others))
        caught_up = reserved.engine is None or reserved.version >= self.current_version()
        if reserved.over.is_set() and caught_up:
            self._reserved = None
        for name in {home, reserved.engine}:
            if name is not None:
                self._enter(name)

    def _leave_behind(self) -> None:
        """Moves requests of training away from the reserved engine once it is behind, because its
        tokens are too old then (I2). They ran on it when it was reserved.
        """
        member = self._reserved_member()
        if member is None or member.version >= self._last_served:
            return
        for lease in member.leases:
            if not lease.evaluates:
                why = f"{member.name} keeps version {member.version} for an evaluation"
                lease.lose(EngineUnavailable(why))


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
    purpose = ", for an evaluation alone" if state.reserved else ""
    return f"{state.name} serves version {state.version}{purpose}"
