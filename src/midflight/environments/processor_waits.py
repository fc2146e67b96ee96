"""The time in which programs of a rollout wait for a processor. No limit of the rollout counts it."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from midflight.stopwatch import Stopwatch


class ProcessorWaits:
    """The time in which at least one program of a rollout waits for a processor. It is read on the
    event loop on which it was made. The programs may be started on others.
    """

    def __init__(self, changed: Callable[[bool], None] = lambda waits: None) -> None:
        """`changed` is called with True when a program waits, and with False when none waits any
        more.
        """
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._num_waiting = 0
        self._watch = Stopwatch()

    def seconds(self) -> float:
        return self._watch.seconds()

    @contextmanager
    def counting(self) -> Generator[None]:
        """Counts the waits of programs that are started within it, also by tasks and threads that
        were started there.
        """
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """A program waits within it."""
        self._call(self._begin)
        try:
            yield
        finally:
            self._call(self._end)

    def _call(self, change: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody reads this any more
            self._loop.call_soon_threadsafe(change)

    def _begin(self) -> None:
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._watch.start()
            self._changed(True)

    def _end(self) -> None:
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._watch.stop()
            self._changed(False)


_current: ContextVar[ProcessorWaits] = ContextVar("processor_waits")


def current_waits() -> ProcessorWaits:
    """The waits of the rollout to which the running code belongs, or of nothing."""
    return _current.get(None) or ProcessorWaits()
