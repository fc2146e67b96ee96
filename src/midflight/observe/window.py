"""Numbers over the recent past."""

from __future__ import annotations

from collections import deque


class Rate:
    """Amount per second over the last `seconds`, or over the time since the first amount while that is shorter."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._recent: deque[tuple[float, float]] = deque()
        self._sum = 0.0
        self._first: float | None = None

    def add(self, at: float, amount: float) -> None:
        """Amounts of the same tenth of a second share an entry, which bounds memory by the window."""
        self._first = at if self._first is None else min(self._first, at)
        self._sum += amount
        if self._recent and at - self._recent[-1][0] < 0.1:
            last, sum_before = self._recent[-1]
            self._recent[-1] = (last, sum_before + amount)
        else:
            self._recent.append((at, amount))

    def per_second(self, now: float) -> float:
        while self._recent and self._recent[0][0] < now - self._seconds:
            self._sum -= self._recent.popleft()[1]
        if self._first is None or not self._recent:
            return 0.0
        return self._sum / max(min(self._seconds, now - self._first), 0.1)


class Mean:
    """Mean of the last `size` numbers; `None` before the first, which is not zero."""

    def __init__(self, size: int) -> None:
        self._recent: deque[float] = deque(maxlen=size)

    def add(self, number: float) -> None:
        self._recent.append(number)

    def value(self) -> float | None:
        return sum(self._recent) / len(self._recent) if self._recent else None
