"""Budgets of restarts: how often a part may be started again without having worked in between.
They only count; `ring` names the loops that start a part again.

A part that has worked since its last start has earned its restarts back, and spent restarts come
back with time. So a part that dies now and then goes on for ever, and one that cannot work ends the
run. The wait before a restart follows from the deaths alone. So a part that works for a moment
between two deaths is not started again and again at once.
"""

from midflight.errors import every_error, first_error
from midflight.run.parts import Restarted
from midflight.run.places.port import PartFailed

REPLENISH_SECONDS = 600.0
"""The seconds after which a spent restart comes back and a death is forgotten. Crashes that far
apart do not end a run of a week.
"""
FIRST_WAIT = 2.0
LONGEST_WAIT = 30.0
"""Seconds before the second restart in a row, which double with each; the first is at once."""


class RestartBudget:
    """The restarts of one part. `now` is of any clock that does not stand still."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spent: list[float] = []
        """The times of the restarts that have not come back."""
        self._deaths: list[float] = []
        """The times of all restarts of the last ten minutes."""

    def left(self, now: float) -> int:
        self._spent = _recent(self._spent, now)
        return self._size - len(self._spent)

    def earn(self) -> None:
        """Gives the part all its restarts back, because it has worked since it was started."""
        self._spent.clear()

    def spend(self, now: float, *, counts: bool = True) -> float | None:
        """Takes a restart, and says how many seconds to wait before it, or None if none is left.

        With `counts` false the death says nothing about the part, and only the wait grows. A budget
        without restarts has none for it either.
        """
        if self._size == 0 or (counts and self.left(now) <= 0):
            return None
        self._deaths = _recent(self._deaths, now)
        wait = 0.0
        if self._deaths:
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (len(self._deaths) - 1))
        self._deaths.append(now)
        if counts:
            self._spent.append(now)
        return wait

    def seconds_to_next(self, now: float) -> float:
        """Seconds until a restart comes back. A budget without restarts answers as if one had just
        been spent.
        """
        if not self._spent:
            return REPLENISH_SECONDS
        return self._spent[0] + REPLENISH_SECONDS - now


def _recent(times: list[float], now: float) -> list[float]:
    return [at for at in times if now - at < REPLENISH_SECONDS]


class RestartBudgets:
    """The budgets of all parts, by name."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._budgets: dict[str, RestartBudget] = {}
        self._furthest = 0

    def of(self, part: str) -> RestartBudget:
        return self._budgets.setdefault(part, RestartBudget(self._size))

    def is_further(self, step: int) -> bool:
        """True if the run has come to a step that it had not reached before. Steps that it makes a
        second time do not count as work.
        """
        before = self._furthest
        self._furthest = max(self._furthest, step)
        return step > before

    def spend_on(self, failures: BaseException, *, now: float, possible: bool = True) -> Restarted:
        """Takes a restart of the part whose failure ended the other parts, and returns a report of
        it. Raises the failure if no restart is left or `possible` is false.

        If several parts ended together, an error that a restart cannot mend takes precedence.
        """
        for one in every_error(failures):
            if not isinstance(one, PartFailed):
                raise one from failures
        failure = first_error(failures)
        if not isinstance(failure, PartFailed) or not possible:
            raise failure from failures
        budget = self.of(failure.part)
        wait = budget.spend(now)
        if wait is None:
            raise failure from failures
        return Restarted(failure.part, str(failure), budget.left(now), wait)
