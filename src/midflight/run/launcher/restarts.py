"""Restarts: how often a part may be started again without having worked in between.

| part | restarts in a row | what counts as work | what its death means |
|---|---|---|---|
| trainer | `run.restarts` | a step that the run had not reached before | all its ranks go on from the last checkpoint; without one, the whole ring begins again |
| gateway | `run.restarts` | such a step | one of several goes on from its store; with the only one, the whole ring begins again |
| engine | `run.restarts` | its first token | it comes back in quarantine, elsewhere if its machine is lost; while others serve it waits for a restart, see `engines` |
| engine that is killed while it starts | `MAX_KILLED` | that of an engine that can do its work | as above; the run ends when no engine can be started, see `killed_starts` |
| worker | `FAILED_STARTS` | its connection to its gateway | its rollouts begin again in others |

A part that has worked since its last start has earned its restarts back, and spent restarts come
back with time. So a part that dies now and then goes on for ever, and one that cannot work ends the
run. The wait before a restart follows from the deaths alone. So a part that works for a moment
between two deaths is not started again and again at once.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count

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
MAX_DOUBLED = 10
"""A wait is doubled so often at most. `LONGEST_WAIT` is reached before, and the power stays small."""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """The restarts that a part has in a row, and when one of them comes back."""

    restarts: int
    seconds_to_return: float = REPLENISH_SECONDS
    first_wait: float = FIRST_WAIT


FAILED_STARTS = RestartRule(2, seconds_to_return=math.inf, first_wait=0.0)
"""The rule of a worker that has ended before it was connected to its gateway: its connection is
refused, or the machine has no room for it.
"""


class RestartBudget:
    """The restarts of one part. `now` is of any clock that does not stand still."""

    def __init__(self, rule: RestartRule) -> None:
        self._rule = rule
        self._spent: list[float] = []
        """The times of the restarts that have not come back."""
        self._deaths: list[float] = []
        """The times of all restarts of the last ten minutes."""

    def left(self, now: float) -> int:
        self._spent = _recent(self._spent, now, self._rule.seconds_to_return)
        return self._rule.restarts - len(self._spent)

    def earn(self) -> None:
        """Gives the part all its restarts back, because it has worked since it was started."""
        self._spent.clear()

    def spend(self, now: float, *, counts: bool = True) -> float | None:
        """Takes a restart, and says how many seconds to wait before it, or None if none is left.

        With `counts` false the death says nothing about the part, and only the wait grows. A budget
        without restarts has none for it either.
        """
        if self._rule.restarts == 0 or (counts and self.left(now) <= 0):
            return None
        self._deaths = _recent(self._deaths, now, REPLENISH_SECONDS)
        wait = 0.0
        if self._deaths:
            doubled = min(len(self._deaths) - 1, MAX_DOUBLED)
            wait = min(LONGEST_WAIT, self._rule.first_wait * 2.0**doubled)
        self._deaths.append(now)
        if counts:
            self._spent.append(now)
        return wait

    def seconds_to_next(self, now: float) -> float:
        """Seconds until a restart comes back. A budget without restarts answers as if one had just
        been spent.
        """
        began = self._spent[0] if self._spent else now
        return began + self._rule.seconds_to_return - now


def _recent(times: list[float], now: float, seconds: float) -> list[float]:
    return [at for at in times if now - at < seconds]


class RestartBudgets:
    """The budgets of all parts by name, each with `size` restarts (`run.restarts`)."""

    def __init__(self, size: int) -> None:
        self._rule = RestartRule(size)
        self._budgets: dict[str, RestartBudget] = {}
        self._furthest = 0

    def of(self, part: str) -> RestartBudget:
        return self._budgets.setdefault(part, RestartBudget(self._rule))

    def is_further(self, step: int) -> bool:
        """True if the run has come to a step that it had not reached before. Steps that it makes a
        second time do not count as work.
        """
        before = self._furthest
        self._furthest = max(self._furthest, step)
        return step > before

    async def keep(
        self,
        live: Callable[[int], Awaitable[None]],
        *,
        between: Callable[[Restarted], Awaitable[None]],
        possible: Callable[[], bool] = lambda: True,
    ) -> None:
        """Runs `live`, with the numbers 0, 1, 2, ..., until one life ends without a failure. After
        a failure it waits for `between`, and then for the back-off.

        Raises the failure if a restart would not help or is not `possible`, or if none is left.
        """
        for number in count():
            try:
                await live(number)
                return
            except (PartFailed, BaseExceptionGroup) as failures:
                restart = self._spend_on(failures, possible=possible())
            await between(restart)
            await asyncio.sleep(restart.seconds)

    def _spend_on(self, failures: BaseException, *, possible: bool) -> Restarted:
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
        now = asyncio.get_running_loop().time()
        budget = self.of(failure.part)
        wait = budget.spend(now)
        if wait is None:
            raise failure from failures
        return Restarted(failure.part, str(failure), budget.left(now), wait)


def is_power_of_two(number: int) -> bool:
    """True for 1, 2, 4, 8 and so on. What happens again and again is told at these times."""
    return number & (number - 1) == 0
