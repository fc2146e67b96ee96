"""How often a part may be started again: at most so often, but what was spent comes back with time. Synchronous."""

from midflight.errors import every_error, first_error
from midflight.run.parts import Restarted
from midflight.run.places.port import PartFailed

REPLENISH_SECONDS = 600.0
"""After this a restart that was spent is there again: crashes that far apart do not end a run of a week, and a crash loop still ends."""
FIRST_WAIT, LONGEST_WAIT = 2.0, 30.0
"""Seconds before the second restart in a row, which double with each; the first is at once."""


class Budget:
    """Of one part. `now` is any clock that does not stand."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spent: list[float] = []
        """When each restart was, of those that have not come back."""

    def left(self, now: float) -> int:
        self._spent = [at for at in self._spent if now - at < REPLENISH_SECONDS]
        return self._size - len(self._spent)

    def spend(self, now: float) -> float | None:
        """Takes a restart, and says how many seconds to wait before it; None when none is left."""
        if self.left(now) <= 0:
            return None
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (len(self._spent) - 1)) if self._spent else 0.0
        self._spent.append(now)
        return wait

    def seconds_to_next(self, now: float) -> float:
        """Until one comes back; as long as one takes where there was never any."""
        return self._spent[0] + REPLENISH_SECONDS - now if self._spent else REPLENISH_SECONDS


class Budgets:
    """Those of all parts, by name."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._budgets: dict[str, Budget] = {}

    def of(self, part: str) -> Budget:
        return self._budgets.setdefault(part, Budget(self._size))

    def spend_on(self, failures: BaseException, *, now: float, possible: bool = True) -> Restarted:
        """Takes a restart of the part whose failure ended the others', and says so. Raises the failure where none is left or `possible`.

        Of errors of parts that ended together, one that a restart cannot mend says most.
        """
        failure = next((one for one in every_error(failures) if not isinstance(one, PartFailed)), first_error(failures))
        if not isinstance(failure, PartFailed) or not possible or (wait := self.of(failure.part).spend(now)) is None:
            raise failure from failures
        return Restarted(failure.part, str(failure), self.of(failure.part).left(now), wait)
