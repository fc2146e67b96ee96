"""Sides that are measured in turn, and the ratio of two of them.

It needs nothing but Python, so that other people's environments can import it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")

TO_10 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
TO_20 = (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
STUDENT = TO_10 + TO_20
"""The 97.5 % point of Student's t for 1 to 20 degrees of freedom."""
NORMAL = 1.96
"""The same for many degrees of freedom."""


# --- Time -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What something took, in seconds."""

    wall: float
    cpu: float


def timed(deed: Callable[[], T], *, cpu: Callable[[], float] = time.process_time) -> tuple[T, Cost]:
    """The result and the cost of one call. `cpu` reads the processor time that is meant: of this
    process, of one thread (`time.thread_time`), or of others.
    """
    began = time.perf_counter()
    used = cpu()
    result = deed()
    return result, Cost(time.perf_counter() - began, cpu() - used)


class Meter:
    """Wall and CPU seconds of steps. `leave_out` takes something off the step that is under way."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._began = Cost(0.0, 0.0)

    def begin(self) -> None:
        self._began = Cost(time.perf_counter(), time.process_time())

    def end(self) -> None:
        self.wall.append(time.perf_counter() - self._began.wall)
        self.cpu.append(time.process_time() - self._began.cpu)

    def leave_out(self, cost: Cost) -> None:
        self._began = Cost(self._began.wall + cost.wall, self._began.cpu + cost.cpu)

    def write(self, path: Path, **more: object) -> None:
        path.write_text(json.dumps({"wall": self.wall, "cpu": self.cpu, **more}))


# --- Rounds ---------------------------------------------------------------------------------------


def turns(names: Iterable[K], *, rounds: int, warmup: int = 0) -> Iterator[tuple[K, bool]]:
    """The sides in the order in which they are measured: all of them in every round, and every
    other round backward. With each goes whether its round counts; the first `warmup` do not.
    """
    order = list(names)
    for number in range(warmup + rounds):
        for name in order:
            yield name, number >= warmup
        order.reverse()
        print(f"round {number + 1} of {warmup + rounds} done", file=sys.stderr, flush=True)


def alternate(
    sides: Mapping[K, Callable[[], T]], *, rounds: int, warmup: int = 0
) -> dict[K, list[T]]:
    """What each side found in the rounds that count."""
    found: dict[K, list[T]] = {name: [] for name in sides}
    for name, counts in turns(sides, rounds=rounds, warmup=warmup):
        result = sides[name]()
        if counts:
            found[name].append(result)
    return found


# --- Numbers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """How many times one side is the other: the geometric mean of the rounds' ratios, and its 95 %
    interval, which one round does not have.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> Ratio:
        """Takes the values of the same rounds, all above 0."""
        logs = [math.log(a / b) for a, b in zip(over, under, strict=True)]
        middle = statistics.fmean(logs)
        if len(logs) < 2:
            return cls(math.exp(middle))
        degrees = len(logs) - 1
        student = STUDENT[degrees - 1] if degrees <= len(STUDENT) else NORMAL
        width = student * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(math.exp(middle), math.exp(middle - width), math.exp(middle + width))

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} (95 %: {self.low:.2f} to {self.high:.2f})"


def median_of(found: Iterable[T], value: Callable[[T], float]) -> float:
    return statistics.median(value(each) for each in found)


def middle_and_range(values: Sequence[float], *, digits: int) -> str:
    """The median, with the smallest and the largest value."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values))
