"""The engine on the trainer's own cores or GPU: it generates while the trainer waits for a batch,
and stands aside while that trains.

It joins and leaves as any engine that comes and goes: its requests are cut, and go on elsewhere
with their tokens (I5). It gets versions as all engines do, also while it stands aside. The fleet
sees whether it lives: a hold outlasts its death and its return.
"""

from collections.abc import Generator
from contextlib import contextmanager

from midflight.gateway.fleet.fleet import Fleet

OWNER = "trainer"
"""The name of its hold."""
SHARE = 0.3
"""The share of the difference to the most loaded engine that moves to it at once. A session stays
where it was below a quarter more than the mean load, so that a larger share would go back.
"""


class Lending:
    """Lends the engine while the trainer waits and has no batch at work: the trainer may ask for
    the next batch before its step is done. Without an engine to lend it does nothing. It is
    synchronous.
    """

    def __init__(self, fleet: Fleet, engine: str | None) -> None:
        self._fleet = fleet
        self._engine = engine
        self._num_waits = 0
        self._at_work = set[int]()
        """Leases of batches that the trainer holds and whose steps it has not reported."""
        self._is_lent = False
        if engine is not None:
            fleet.lent = engine
            fleet.hold(engine, OWNER)

    @contextmanager
    def while_waiting(self) -> Generator[None]:
        """Enters that the trainer waits during the block, for a batch or for the end."""
        self._num_waits += 1
        self._settle()
        try:
            yield
        finally:
            self._num_waits -= 1
            self._settle()

    def given(self, lease: int) -> None:
        """Notes that the trainer has a batch, or is about to get it."""
        self._at_work.add(lease)
        self._settle()

    def done(self, *leases: int) -> None:
        """Notes that the trainer has made the steps of these batches, or given the batches back.
        Without a lease it began anew, and has no batch.
        """
        if leases:
            self._at_work.difference_update(leases)
        else:
            self._at_work.clear()
        self._settle()

    def _settle(self) -> None:
        if self._engine is None:
            return
        is_lent = self._num_waits > 0 and not self._at_work
        if is_lent == self._is_lent:
            return
        self._is_lent = is_lent
        if is_lent:
            self._join(self._engine)
        else:
            self._leave(self._engine)

    def _join(self, engine: str) -> None:
        """Requests of the most loaded engine move there, the youngest first: those that only wait
        inside that engine, and a share of the others.
        """
        fleet = self._fleet
        fleet.release(engine, OWNER)
        loads = {
            state.name: state.tokens_in_flight for state in fleet.states() if not state.reserved
        }
        most = max(loads, key=loads.__getitem__, default=engine)
        room = SHARE * (loads.get(most, 0) - loads.get(engine, 0))
        leases = fleet.leases(most)
        for place in range(len(leases), 0, -1):
            lease = leases[place - 1]
            only_waits = place > lease.engine.capabilities.max_running
            if lease.lost is None and (only_waits or lease.tokens <= room):
                room -= lease.tokens
                lease.move(f"shares its requests with {engine}")

    def _leave(self, engine: str) -> None:
        self._fleet.hold(engine, OWNER)
        for lease in self._fleet.leases(engine):
            lease.move("makes way for the trainer")
