"""Which part of a device's check begins next. It needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midflight.run.device_check.table import GIB, PartPlan


def num_lanes() -> int:
    """The number of parts that run side by side: each wants two cores."""
    return max(2, len(os.sched_getaffinity(0)) // 2)


def in_order(parts: Mapping[str, PartPlan]) -> Sequence[str]:
    """The parts that run beside others, those with a server before the others: they take
    longest.
    """
    beside = [name for name, plan in parts.items() if not plan.is_alone]
    return sorted(beside, key=lambda name: not parts[name].server)


@dataclass(frozen=True, slots=True)
class PartStart:
    """A part that may begin."""

    part: str
    lane: int
    """The lowest number that no other running part has, from 1."""
    room: int
    """The bytes of the device's memory that it may take. 0 if that is the host's memory."""


class Lanes:
    """Parts that wait for a lane and for memory of the device. It never waits itself."""

    def __init__(
        self, waiting: Sequence[str], plans: Mapping[str, PartPlan], *, number: int, memory: int
    ) -> None:
        """`number` parts may run side by side, in `memory` bytes; 0 means that nobody counts it."""
        self._waiting = list(waiting)
        self._plans = plans
        self._memory = memory
        self._free = memory
        self._lanes = list(range(1, number + 1))

    def next(self) -> PartStart | None:
        """The first part that waits and whose memory is free, in a lane that is free. None if there
        is none; then one must end first.
        """
        if not self._lanes:
            return None
        for part in self._waiting:
            room = self._room(part)
            if room <= self._free:
                self._waiting.remove(part)
                self._free -= room
                return PartStart(part, self._lanes.pop(0), room)
        return None

    def end(self, start: PartStart) -> None:
        """Gives the lane and the memory of a part back."""
        self._free += start.room
        self._lanes = sorted([*self._lanes, start.lane])

    def _room(self, part: str) -> int:
        plan = self._plans[part]
        if plan.is_alone:
            return self._memory
        return min(plan.gigabytes * GIB, self._memory)
