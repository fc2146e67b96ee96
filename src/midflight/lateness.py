"""The delay of heartbeats: the time that a busy machine adds to every wait for one. A limit on
silence is the allowed time plus this delay.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median_low


class Lateness:
    """The lateness of one series of events that should come at an interval, such as the heartbeats
    of a process. `now` is the time of any monotonic clock.

    late = max(0, time since the event before - interval)
    worst(now) = the largest `late` of the last `memory_seconds`
    """

    def __init__(self, interval: float, *, memory_seconds: float) -> None:
        self._interval = interval
        self._memory_seconds = memory_seconds
        self._last: float | None = None
        self._found = deque[tuple[float, float]]()
        """Pairs of a time and a lateness, the largest lateness first. An entry is forgotten as soon
        as a larger one follows.
        """

    def came(self, now: float, *, counts: bool = True) -> None:
        """An event has come. With `counts=False` its lateness does not count, because the sender
        had a reason to be late.
        """
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
    """The delay of all events that this process receives: its own lateness, or the median lateness
    of the senders, whichever is more.
    """
    lateness = [other.worst(now) for other in others]
    return max(own.worst(now), median_low([0.0, *lateness]))
