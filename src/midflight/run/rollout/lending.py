"""The engine on the trainer's own cores or GPU: it generates while the trainer waits for a batch,
and stands aside while that trains.

It joins and leaves as any engine that comes and goes, by requests that are cut and go on elsewhere
with their tokens (I5). Versions come to it as to all, also while it stands aside. Whether it lives
is the fleet's matter: a hold outlasts its death and its return.
"""

from collections.abc import Generator
from contextlib import contextmanager

from midflight.gateway.fleet.fleet import Fleet

OWNER = "trainer"
"""The name of its hold."""
SHARE = 0.3
"""Of the difference to the most loaded engine, what moves to it at once. Sessions stay where they
were below a quarter more than the mean load, so that more would go back."""


class Lending:
    """Synchronous. The engine is lent while the trainer waits and has no batch at work: it asks for
    the next one before its step is done. Without an engine to lend it does nothing."""

    def __init__(self, fleet: Fleet, engine: str | None) -> None:
        self._fleet = fleet
        self._engine = engine
        self._num_waits = 0
        self._at_work = set[int]()
        """Leases of batches that the trainer has and has not reported."""
        self._is_lent = False
        if engine is not None:
            fleet.lent = engine
            fleet.hold(engine, OWNER)

    @property
    def is_on(self) -> bool:
        return self._engine is not None

    @contextmanager
    def while_waiting(self) -> Generator[None]:
        """The trainer waits for as long as the block takes, for a batch or for the end."""
        self._num_waits += 1
        self._settle()
        try:
            yield
        finally:
            self._num_waits -= 1
            self._settle()

    def given(self, lease: int) -> None:
        """It has a batch, or is about to."""
        self._at_work.add(lease)
        self._settle()

    def done(self, *leases: int) -> None:
        """It has made the step of a batch, or given it back; none: it began anew, and has no
        batch.
        """
        self._at_work.difference_update(leases or tuple(self._at_work))
        self._settle()

    def _settle(self) -> None:
        if self._engine is None or self._is_lent == (
            is_lent := self._num_waits > 0 and not self._at_work
        ):
            return
        self._is_lent = is_lent
        if is_lent:
            self._join(self._engine)
        else:
            self._leave(self._engine)

    def _join(self, engine: str) -> None:
        """Requests of the engine that has most move there, the youngest first: those that only wait
        inside it, and some.
        """
        fleet = self._fleet
        fleet.release(engine, OWNER)
        loads = {
            state.name: state.tokens_in_flight for state in fleet.states() if not state.reserved
        }
        most = max(loads, key=loads.__getitem__, default=engine)
        room = SHARE * (loads.get(most, 0) - loads.get(engine, 0))
        leases = fleet.leases(most)
        for waiting, lease in zip(range(len(leases), 0, -1), reversed(leases), strict=True):
            if (
                lease.tokens <= room or waiting > lease.engine.capabilities.max_running
            ) and lease.lost is None:
                room -= lease.tokens
                lease.move(f"shares its requests with {engine}")

    def _leave(self, engine: str) -> None:
        self._fleet.hold(engine, OWNER)
        for lease in self._fleet.leases(engine):
            lease.move("makes way for the trainer")
