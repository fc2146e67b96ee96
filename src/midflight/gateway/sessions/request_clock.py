"""Measures how long the requests of one rollout are under way. In that time its agent waits and
does no work of its own. Synchronous.

A request is under way from its arrival until its answer is complete, it has failed, or its client
has disconnected. This includes the time in the queue, the time while no engine takes it, and the
time on an engine. After a refusal that names a delay, the clock runs on until the next request, for
that delay at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from midflight.types import RequestTime


class RequestClock:
    """The clock of one rollout, for all its sessions together. Implements `ports.RequestWatch`."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] | None = None
        self.waits = False
        """See the port."""
        self.num_restarts = 0
        self._num = 0
        self._num_open = 0
        self._seconds = 0.0
        """The length of all waits that are over."""
        self._since = 0.0
        """When the current wait began."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends the wait after a refusal."""

    def begin(self) -> OpenRequest:
        """A request has arrived. `OpenRequest.end` must follow."""
        self._num += 1
        self._num_open += 1
        if self._timer is not None:
            self._stop_timer()
        self._wait()
        return OpenRequest(self)

    def refused(self, seconds: float) -> None:
        """The agent was told to try again after so many seconds."""
        self._stop_timer()
        self._wait()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._waited)

    def begin_again(self) -> None:
        """The agent starts over, so earlier requests and waits no longer count."""
        self.num_restarts += 1
        self._num = self._num_open
        self._seconds = 0.0
        self._since = _now()
        self._changed()

    def read(self) -> RequestTime:
        under_way = _now() - self._since if self.waits else 0.0
        return RequestTime(self._num, self._seconds + under_way)

    def ended(self) -> None:
        """One of the requests is no longer under way."""
        self._num_open -= 1
        if not self._num_open and self._timer is None:
            self._waited()

    def _wait(self) -> None:
        if not self.waits:
            self.waits = True
            self._since = _now()
            self._changed()

    def _waited(self) -> None:
        self._timer = None
        if self.waits and not self._num_open:
            self.waits = False
            self._seconds += _now() - self._since
            self._changed()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


class OpenRequest:
    """A request that is under way."""

    __slots__ = ("_clock",)

    def __init__(self, clock: RequestClock) -> None:
        self._clock: RequestClock | None = clock

    def end(self) -> None:
        """Ends the request. Idempotent."""
        clock = self._clock
        self._clock = None
        if clock is not None:
            clock.ended()


def _now() -> float:
    return asyncio.get_running_loop().time()
