"""The members of a fleet, and the leases of the requests that run on them."""

from __future__ import annotations

import asyncio

from midflight.allowance import Allowance
from midflight.errors import EngineUnavailable
from midflight.gateway.fleet.pauses import SharedPause
from midflight.gateway.fleet.routing import Loads
from midflight.ports import Engine
from midflight.types import Version


class Lease:
    """A request's place on an engine, until `Fleet.leave`. When the engine is lost, the request's
    wait is cut and `lost` says why.
    """

    def __init__(
        self, member: Member, *, tokens: int, allowance: Allowance, evaluates: bool
    ) -> None:
        self.engine = member.shared.engine
        self.evaluates = evaluates
        """True if the request belongs to a session that the engine is reserved for."""
        self.version = member.version
        """The version that the engine had attested when the request was placed. None of its tokens
        can be older.
        """
        self.tokens = tokens
        self.allowance = allowance
        self.lost: BaseException | None = None
        self.moved = False
        """True if the request goes on elsewhere although nothing is wrong with the engine or the
        request.
        """
        self._member = member
        member.leases[self] = None
        member.load(tokens)

    @property
    def may_be_queued(self) -> bool:
        """True if the request may wait inside the engine, because the engine has more requests than
        it can serve at once.
        """
        return self._member.is_crowded

    def lose(self, error: BaseException) -> None:
        """Cuts the request's wait. Idempotent, because a second cut would end a wait that does not
        belong to this lease.
        """
        if self.lost is None:
            self.lost = error
            self.allowance.cut()

    def move(self, why: str) -> None:
        """Ends the attempt here. The request goes on elsewhere, with the tokens that it has."""
        self.moved = True
        self.lose(EngineUnavailable(f"{self.engine.name} {why}"))

    def end(self) -> None:
        """Gives the place back. Idempotent."""
        member = self._member
        if self in member.leases:
            del member.leases[self]
            member.load(-self.tokens)
            if member.emptied is not None and not member.leases:
                member.emptied.set()


class Member:
    """An attached engine. Its version is the last one that it attested."""

    def __init__(
        self,
        engine: Engine,
        version: Version,
        error: BaseException | None,
        *,
        loads: Loads,
        order: int,
    ) -> None:
        """`loads` gets the engine's load as long as `is_in` is true. `order` is its place in the
        order of arrival.
        """
        self._loads = loads
        self.order = order
        self.shared = SharedPause(engine)
        self.version = version
        self.error = error
        self.is_new = error is not None
        """True if it has attested nothing yet."""
        self.on_probation = False
        self.leases: dict[Lease, None] = {}
        self.tokens_in_flight = 0
        self.num_queued = 0
        """Requests that wait inside it, at the last reading of its health."""
        self.is_in = False
        """True if it is in `loads`."""
        self.serves: Version | None = None
        """The version that it counts with among the engines that serve training. It is `None` if it
        does not count.
        """
        self.emptied: asyncio.Event | None = None
        """Set at the end of its last request. `None` if no task waits for that."""

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
        """Adds tokens to its load; a negative number takes them away."""
        self.tokens_in_flight += tokens
        if self.is_in:
            self._loads.add(self.shared.engine.name, tokens, full=self._is_full)

    def stand(self, *, takes: bool) -> None:
        """Puts it into `loads` or takes it out. `takes` is true if requests may go there, as far as
        the engine alone decides.
        """
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
