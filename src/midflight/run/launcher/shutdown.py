"""Runs a command's work until its end, or until a signal or another thread asks for its end. It may
run in any thread and beside any event loop.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from midflight.errors import first_error

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""One of these ends a command in order; one more ends it at once."""
LOOK_SECONDS = 0.2
"""The time between two looks of a main thread that waits. A signal that the system gave to another
thread does not wake it, and is seen at the next look.
"""


class Shutdown:
    """Asks a command to end, from any thread. After the first request, the command ends in order.
    After the second, it no longer waits for its parts.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may ask in the midst of asking
        self._cancel: Callable[[], None] | None = None
        self.asked: signal.Signals | None = None
        """The signal by which it was asked first. None while it was not."""

    def ask(self, number: signal.Signals = signal.SIGINT) -> None:
        with self._lock:
            self.asked = self.asked or number
            if self._cancel is not None:
                self._cancel()

    def reaches(self, cancel: Callable[[], None] | None) -> None:
        """Sets `cancel`, which asks the command to end. If an end has been asked for already, it is
        called at once. It is called from any thread. None means that the command has ended.
        """
        with self._lock:
            self._cancel = cancel
            if cancel is not None and self.asked is not None:
                cancel()


def main_task(main: Coroutine[Any, Any, object], *, stop: Shutdown | None = None) -> int:
    """Runs `main` to its end and returns 0. A signal of `STOPS`, or `stop`, cancels it: then the
    return value is 130, 143 or 129. A second signal cuts short the waits of its end, so that parts
    are killed without waiting for them. `nohup` stays in force.

    Signals reach only the main thread of a program; in other threads their handlers stay as they
    are. If an event loop runs already, as in a notebook, `main` runs in a thread of its own, and
    this thread waits for it. A `KeyboardInterrupt` during that wait counts as SIGINT.
    """
    asked = stop or Shutdown()
    if _loop_runs():
        return _in_thread(main, asked)
    return asyncio.run(_until_asked(main, asked))


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _until_asked(main: Coroutine[Any, Any, object], stop: Shutdown) -> int:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    assert task is not None
    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop.ask, number)

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    stop.reaches(cancel)
    try:
        await main
    except asyncio.CancelledError:
        if stop.asked is None:
            raise
        return 128 + stop.asked
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    finally:
        stop.reaches(None)
    return 0


def _in_thread(main: Coroutine[Any, Any, object], stop: Shutdown) -> int:
    """Waits for the end of `main`, and looks up now and then for signals."""
    ended: Future[int] = Future()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(_until_asked(main, stop)))
        except BaseException as error:
            ended.set_exception(error)

    with _interrupts(stop):
        threading.Thread(target=run, name="midflight").start()  # which waits for it to begin
    while not ended.done():
        with _interrupts(stop):
            wait([ended], timeout=LOOK_SECONDS)
    return ended.result()


@contextmanager
def _interrupts(stop: Shutdown) -> Generator[None]:
    """Turns an interrupt, which would be an error, into a request for the end."""
    try:
        yield
    except KeyboardInterrupt:
        stop.ask()
