"""Numbers over the recent past, and the exact time in which two sides were busy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class _Amount:
    """An amount that came evenly from `started` to `ended`."""

    started: float
    ended: float
    amount: float

    def since(self, moment: float) -> float:
        """The part of it that came after a moment."""
        if self.started >= moment:
            return self.amount
        if self.ended <= moment:
            return 0.0
        return self.amount * (self.ended - moment) / (self.ended - self.started)


class Rate:
    """The amount per second over the last `seconds`, and 0 if none came in these. It is over the
    time since the newest amount began where that is longer, and since the first one began while
    that is shorter.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._recent: deque[_Amount] = deque()
        self._first: float | None = None

    def add(self, started: float, ended: float, amount: float) -> None:
        """Adds what came in this time. What comes within the same tenth of a second shares an
        entry, so that the window bounds the memory.
        """
        self._first = started if self._first is None else min(self._first, started)
        if self._recent and ended - self._recent[-1].started < 0.1:
            last = self._recent[-1]
            last.started = min(last.started, started)
            last.ended = max(last.ended, ended)
            last.amount += amount
        else:
            self._recent.append(_Amount(started, ended, amount))

    def per_second(self, now: float) -> float:
        if self._first is None or self._recent[-1].ended < now - self._seconds:
            return 0.0
        since = max(self._first, min(now - self._seconds, self._recent[-1].started))
        while self._recent[0].ended < since:
            self._recent.popleft()
        return sum(one.since(since) for one in self._recent) / max(now - since, 0.1)


class Mean:
    """The mean of the last `size` numbers. It is None before the first, which is not zero."""

    def __init__(self, size: int) -> None:
        self._recent: deque[float] = deque(maxlen=size)

    def add(self, number: float) -> None:
        self._recent.append(number)

    def value(self) -> float | None:
        return sum(self._recent) / len(self._recent) if self._recent else None


SLACK_SECONDS = 120.0
"""The seconds that an interval may arrive late and still be counted exactly. A step's report is
never under way for so long.
"""
MAX_SPANS = 50_000
"""The number of spans of a side that are kept, a few MB. Beyond that the older half is settled in
any case.
"""


@dataclass(slots=True)
class Spans:
    """A union of intervals as disjoint spans in order: `starts[i] < ends[i] < starts[i + 1]`."""

    starts: list[float] = field(default_factory=list[float])
    ends: list[float] = field(default_factory=list[float])

    def add(self, start: float, end: float) -> None:
        """Joins [start, end] with every span it touches."""
        if end <= start:
            return
        first = bisect_left(self.ends, start)
        after = bisect_right(self.starts, end)
        if first < after:
            start = min(start, self.starts[first])
            end = max(end, self.ends[after - 1])
        self.starts[first:after] = [start]
        self.ends[first:after] = [end]

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self.starts, self.ends, strict=True)

    def length(self) -> float:
        return sum(self.ends) - sum(self.starts)

    def cut(self, line: float) -> Spans:
        """Takes out and returns everything before `line`; a span across it is divided."""
        last = bisect_left(self.starts, line)
        before = Spans(self.starts[:last], self.ends[:last])
        del self.starts[:last], self.ends[:last]
        if before.ends and before.ends[-1] > line:
            self.starts.insert(0, line)
            self.ends.insert(0, before.ends[-1])
            before.ends[-1] = line
        return before


def common_length(a: Spans, b: Spans) -> float:
    """The length of the intersection: how much of `b` lies before the ends of `a`'s spans, less how
    much of it lies before their starts.
    """
    if not a.starts or not b.starts:
        return 0.0
    edges = np.column_stack((b.starts, b.ends))
    lengths = edges[:, 1] - edges[:, 0]
    before_end = np.cumsum(lengths)
    length_before = np.column_stack((before_end - lengths, before_end)).reshape(-1)
    starts, ends = np.interp((a.starts, a.ends), edges.reshape(-1), length_before)
    return float((ends - starts).sum())


class Overlap:
    """The time that two sides were busy, and both together, since `begin`.

    Spans that lie further back than `SLACK_SECONDS` before the newest end of both sides are settled
    into sums and forgotten, so that memory stays flat however long the run is. An interval that
    arrives later than that is counted from the settled line on.
    """

    def __init__(self) -> None:
        self._sides = (Spans(), Spans())
        self._latest = [0.0, 0.0]
        self._settled = [0.0, 0.0, 0.0]
        self._line: float | None = None
        self._end: float | None = None
        self._began: float | None = None

    def begin(self, at: float) -> None:
        """Begins to count. The time before `at` does not count."""
        self._began = at
        self._line = at

    def finish(self, at: float) -> None:
        """Ends the count. The time after `at` does not count."""
        self._end = at
        self._sides = (self._sides[0].cut(at), self._sides[1].cut(at))

    def seconds(self, now: float) -> float:
        """Seconds from the beginning of the count until its end, or until `now` while it goes
        on.
        """
        if self._began is None:
            return 0.0
        end = now if self._end is None else self._end
        return max(0.0, end - self._began)

    def add(self, side: int, start: float, end: float) -> None:
        """Counts that side 0 or 1 was busy in [start, end]. Before `begin` it keeps nothing."""
        if self._line is None:
            return
        if self._end is not None:
            end = min(end, self._end)
        spans = self._sides[side]
        spans.add(max(start, self._line), end)
        self._latest[side] = max(self._latest[side], end)
        if len(spans.starts) > MAX_SPANS:
            self._settle(spans.starts[MAX_SPANS // 2])
        elif len(spans.starts) % 1024 == 0:
            self._settle(min(self._latest) - SLACK_SECONDS)

    def busy(self) -> tuple[float, float, float]:
        """Seconds of side 0, of side 1, and of both at once."""
        a, b = self._sides
        return (
            self._settled[0] + a.length(),
            self._settled[1] + b.length(),
            self._settled[2] + common_length(a, b),
        )

    def _settle(self, line: float) -> None:
        if self._line is None or line <= self._line:
            return
        a = self._sides[0].cut(line)
        b = self._sides[1].cut(line)
        self._settled[0] += a.length()
        self._settled[1] += b.length()
        self._settled[2] += common_length(a, b)
        self._line = line
