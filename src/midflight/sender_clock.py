"""The times of another process, translated to the clock of this one."""

from __future__ import annotations

from typing import Final

DRIFT: Final = 1e-4
"""Seconds a second that two machines' clocks may run apart: several times what quartz does."""


class SenderClock:
    """One sender's CLOCK_MONOTONIC, which began when its machine did: on two machines it differs by
    days.

        our time = its time + shift,   shift = the least (arrival - sending) of its messages so far,
        and DRIFT a second more

    So the error is the way of the quickest message: microseconds on one machine, where what is told
    stays what it was. A message that was late, because either side was busy, moves nothing.
    """

    def __init__(self) -> None:
        self._shift: float | None = None
        self._heard = 0.0

    def shift(self, sent: float, *, now: float) -> float:
        """Seconds to be added to the sender's times, after a message that it sent at `sent`, by its
        clock, and that is here `now`.
        """
        way = now - sent
        self._shift = (
            way if self._shift is None else min(way, self._shift + DRIFT * (now - self._heard))
        )
        self._heard = now
        return self._shift
