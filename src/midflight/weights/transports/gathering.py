"""Who waits for which bytes, and when there are enough of them for one broadcast. Pure: it never waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from midflight.weights.transports.rendezvous import Answer, Ask

MAX_WAITING = 256
"""Receivers that wait at once: more than the engines that one trainer feeds."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A receiver that waits for a broadcast, and the ways to answer it; they never wait."""

    ask: Ask
    since: float
    """Seconds of the clock that `Gathering` is asked by."""
    answer: Callable[[Answer], None]
    hang_up: Callable[[], None]


class Gathering:
    """Members in the order of their coming. Those who want what the first one wants go together, in one broadcast.

    They go when `expected` of them have come, or when none has come for `quiet_seconds`: engines are told of a version within
    milliseconds of each other, and one that is late or comes back gets a broadcast of its own.
    """

    def __init__(self, *, expected: int | None, quiet_seconds: float) -> None:
        self._expected, self._quiet_seconds = expected, quiet_seconds
        self._waiting: list[Member] = []

    def join(self, member: Member) -> bool:
        """Takes the place of an earlier question of the same receiver; `False` when there is no room."""
        self._waiting = [m for m in self._waiting if m.ask.member != member.ask.member]
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(member)
        return True

    def leave(self, member: Member) -> None:
        """It hung up. Nothing happens if it has gone into a broadcast."""
        self._waiting = [m for m in self._waiting if m is not member]

    def seconds_left(self, now: float) -> float | None:
        """Until the next broadcast may begin; `None` while nobody waits."""
        together = self._together()
        if not together:
            return None
        if self._expected is not None and len(together) >= self._expected:
            return 0.0
        return max(0.0, together[-1].since + self._quiet_seconds - now)

    def take(self) -> list[Member]:
        """Those who go now; none if nobody waits."""
        together = self._together()
        self._waiting = [m for m in self._waiting if m not in together]
        return together

    def _together(self) -> list[Member]:
        return [m for m in self._waiting if m.ask.fingerprint == self._waiting[0].ask.fingerprint]
