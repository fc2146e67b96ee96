"""Counts how often engines are killed while they start, which the kernel does to processes for
which there is no memory. It is synchronous.

A killed start is not the model's fault, so it spends no restart (`restarts`). But if every engine
that could do the work was killed `MAX_KILLED` times at its start, and none of them came up in
between, another start would end in the same way. Only the number of failed starts counts, never the
time that they took.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from midflight.run.launcher.restarts import is_power_of_two

MAX_KILLED = 10
"""The most starts in a row that may be killed. A user may end engines by hand, and another program
may take all memory for some minutes.
"""


class KilledStarts:
    """Counts for each engine how often it was killed while it started. The count begins anew when
    an engine that can do its work has served.
    """

    def __init__(self) -> None:
        self._nums = Counter[str]()

    def add(self, name: str) -> int:
        """Counts one more kill, and returns how many there have been."""
        self._nums[name] += 1
        return self._nums[name]

    def forget(self, names: Iterable[str]) -> None:
        """Begins the counts of these engines anew, because an engine that can do their work has
        served.
        """
        for name in names:
            del self._nums[name]

    def have_ended(self, names: Iterable[str]) -> bool:
        """True if none of them can be expected to come up."""
        return all(self._nums[name] >= MAX_KILLED for name in names)


def is_told(num: int) -> bool:
    """True after the second kill, the fourth, the eighth and so on. The user then gets a message
    with the remedy. One kill says little.
    """
    return num > 1 and is_power_of_two(num)


def why_killed(num: int, name: str, memory: str) -> str:
    """Returns the message for a user whose engine was killed `num` times in a row."""
    return (
        f"{name} was killed {num} times in a row while it started, which the kernel does where "
        f"memory is short. {memory}"
    )


def why_ended(names: Sequence[str], memory: str) -> str:
    """The error of a run in which all engines that could do the work were killed."""
    times = (
        f"killed {MAX_KILLED} times in a row while starting, which the kernel does where "
        "memory is short"
    )
    if len(names) == 1:
        return f"{names[0]} could not be started: it was {times}. {memory}"
    return f"no engine could be started: {' and '.join(names)} were each {times}. {memory}"
