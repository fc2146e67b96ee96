"""How late signs of life come: what a busy machine adds to every wait for one. A bound on silence
is what is allowed and this delay together.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median_low


class Lateness:
    """Of one series of events that should come at an interval, such as the beats of a process.
    `now` is any clock that runs on.

    late = max(0, time since the event before - interval)
    worst(now) = the largest `late` of the last `memory_seconds`
    """

    def __init__(self, interval: float, *, memory_seconds: float) -> None:
        self._interval = interval
        self._memory_seconds = memory_seconds
        self._last: float | None = None
        self._found = deque[tuple[float, float]]()
        """When and how late, the largest first: what is followed by something larger is forgotten
        at once.
        """

    def came(self, now: float, *, counts: bool = True) -> None:
        """One of the events. It does not count where its sender had a reason to be late."""
        if self._last is not None and counts:
            late = max(0.0, now - self._last - self._interval)
            while self._found and self._found[-1][1] <= late:
                self._found.pop()
            self._found.append((now, late))
        self._last = now

    def worst(self, now: float) -> float:
        while self._found and now - self._found[0][0] > self._memory_seconds:
            self._found.popleft()
        return self._found[0][1] if self._found else 0.0


def delay_of(own: Lateness, others: Iterable[Lateness], now: float) -> float:
    """Of all that is heard here: how late the hearer itself is, or half of those that it hears,
    whichever is more.
    """
    return max(own.worst(now), median_low([0.0, *(other.worst(now) for other in others)]))
