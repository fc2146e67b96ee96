"""Reminds people of a wait that takes long."""

import asyncio
from collections.abc import Callable

REMINDER_SECONDS = 30.0
"""The seconds after which people are reminded for the first time."""


class Reminder:
    """Calls `say` with the seconds of a wait: after `REMINDER_SECONDS`, and again each time that the
    wait has doubled. The wait begins when this is made, on the event loop, and ends with `close`.
    """

    def __init__(self, say: Callable[[float], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(REMINDER_SECONDS, self._remind, REMINDER_SECONDS)

    def close(self) -> None:
        self._timer.cancel()

    def _remind(self, waited: float) -> None:
        self._timer = self._loop.call_later(waited, self._remind, 2 * waited)
        self._say(waited)
