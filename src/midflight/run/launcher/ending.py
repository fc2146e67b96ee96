"""Running what a command does, in any thread and beside any event loop: to its end, or until a
signal or another thread asks for it.
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
"""What ends a command in order; once more of any ends it at once."""
LOOK_SECONDS = 0.2
"""A signal that the system gave to another thread does not wake the main one: it is seen when that
looks up.
"""


class Stop:
    """Asks a command to end: in order at first; asked again, it does not wait for its parts any
    more. From any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may ask in the midst of asking
        self._cancel: Callable[[], None] | None = None
        self.asked: signal.Signals | None = None
        """As what it was asked first; none if it was not."""

    def ask(self, number: signal.Signals = signal.SIGINT) -> None:
        with self._lock:
            self.asked = self.asked or number
            if self._cancel is not None:
                self._cancel()

    def reaches(self, cancel: Callable[[], None] | None) -> None:
        """From now on it is asked by `cancel`, also where somebody has asked already; none where it
        has ended. `cancel` may come from any thread.
        """
        with self._lock:
            self._cancel = cancel
            if cancel is not None and self.asked is not None:
                cancel()


def main_task(main: Coroutine[Any, Any, object], *, stop: Stop | None = None) -> int:
    """Runs to the end, or until a signal of `STOPS` or `stop` asks for it, which cancels it: 130,
    143 or 129. Whoever asks again cuts short what it waits for then, so that parts are killed and
    not waited for. `nohup` stays in force.

    Signals reach the main thread of a program alone: elsewhere they stay as they are. Where an
    event loop runs already, as in a notebook, it runs in a thread of its own, for which this one
    waits; a `KeyboardInterrupt` while it waits is SIGINT.
    """
    asked = stop or Stop()
    return _in_thread(main, asked) if _loop_runs() else asyncio.run(_until_asked(main, asked))


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _until_asked(main: Coroutine[Any, Any, object], stop: Stop) -> int:
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


def _in_thread(main: Coroutine[Any, Any, object], stop: Stop) -> int:
    """Waits for it, and looks up now and then; ended by it."""
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
def _interrupts(stop: Stop) -> Generator[None]:
    """An interrupt asks for the end, and is no error."""
    try:
        yield
    except KeyboardInterrupt:
        stop.ask()
