"""The times of another process, translated to the clock of this one."""

from __future__ import annotations

from typing import Final

DRIFT: Final = 1e-4
"""The seconds per second by which two machines' clocks may diverge. This is several times the drift
of quartz.
"""


class SenderClock:
    """The CLOCK_MONOTONIC of one sender. It began when its machine started, so the clocks of two
    machines differ by days.

        our time = its time + shift,   shift = the least (arrival - sending) of its messages so far,
        growing by DRIFT each second

    So the error is the travel time of the quickest message. On one machine that is some
    microseconds, so its times stay as they are. A message that was late, because either side was
    busy, changes nothing.
    """

    def __init__(self) -> None:
        self._shift: float | None = None
        self._heard = 0.0

    def shift(self, sent: float, *, now: float) -> float:
        """The seconds to add to the sender's times. The message was sent at `sent`, by the sender's
        clock, and arrived at `now`.
        """
        shift = now - sent
        if self._shift is not None:
            shift = min(shift, self._shift + DRIFT * (now - self._heard))
        self._shift = shift
        self._heard = now
        return shift
