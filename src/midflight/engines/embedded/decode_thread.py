"""The one thread that steps the scheduler, and the only one that touches it while it runs."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from midflight.engines.embedded.scheduler import Scheduler
from midflight.engines.streams import StepOutput
from midflight.errors import EngineUnavailable

R = TypeVar("R")
_Command: TypeAlias = tuple[Callable[[], Any], "Future[Any] | None"]
"""A function to call, and the future that gets its result or its error."""


class DecodeThread:
    """Runs commands between two steps, and steps while there is work. Commands may be posted from
    any thread, also before `run`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._quiet: list[Future[None]] = []
        self._ended: EngineUnavailable | None = None

    def post(self, command: Callable[[], None]) -> None:
        """Runs `command` before the next step. Raises `EngineUnavailable` after the end."""
        self._append(command, None)

    def call(self, command: Callable[[], R]) -> Future[R]:
        """Posts a command as `post` does, and returns a future of its result or error."""
        future: Future[R] = Future()
        self._append(command, future)
        return future

    def until_quiet(self) -> Future[None]:
        """A future that is done when the engine produces no token any more, or is not paused after
        all.
        """
        future: Future[None] = Future()
        self._append(lambda: self._quiet.append(future), None)
        return future

    def run(self, deliver: Callable[[StepOutput], object]) -> None:
        """Waits for commands while there is no work. `stop` ends it. An error of a step ends it too
        and is raised.
        """
        error = EngineUnavailable("the engine was stopped. Send the request to another engine.")
        busy = False
        try:
            while True:
                commands = self._next_commands(busy)
                if commands is None:
                    break
                for command, future in commands:
                    _run(command, future)
                if commands:
                    busy = self._scheduler.has_work()
                if busy:
                    deliver(self._scheduler.step())
                if self._quiet:
                    self._settle_quiet()
                busy = self._scheduler.has_work()
        except Exception as cause:
            error = EngineUnavailable(
                f"the decode loop crashed: {cause!r}. Restart the engine; requests may be resumed "
                "elsewhere."
            )
            error.__cause__ = cause
            raise error from cause
        finally:
            self._close(error)

    def stop(self) -> None:
        """Ends `run` after its present step. Commands that were posted and have not run yet fail
        with `EngineUnavailable`.
        """
        with self._changed:
            self._ended = self._ended or EngineUnavailable(
                "the engine was stopped. Send the request to another engine."
            )
            self._changed.notify()

    def check(self) -> None:
        """Raises `EngineUnavailable` after the end."""
        if self._ended is not None:
            raise self._ended

    def _append(self, command: Callable[[], Any], future: Future[Any] | None) -> None:
        with self._changed:
            if self._ended is not None:
                raise self._ended
            self._commands.append((command, future))
            self._changed.notify()

    def _next_commands(self, busy: bool) -> Sequence[_Command] | None:
        """Returns the commands that were posted, in order, or `None` at the end. Waits for a
        command unless the thread is `busy` with other work.
        """
        with self._changed:
            while not (busy or self._commands or self._ended is not None):
                self._changed.wait()
            if self._ended is not None:
                return None
            commands = self._commands
            self._commands = deque()
            return commands

    def _settle_quiet(self) -> None:
        if not self._scheduler.is_quiet() and self._scheduler.paused is not None:
            return
        waiting = self._quiet
        self._quiet = []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _close(self, error: EngineUnavailable) -> None:
        with self._changed:
            self._ended = error
            commands = self._commands
            self._commands = deque()
        waiting: list[Future[Any]] = list(self._quiet)
        waiting += [future for _, future in commands if future is not None]
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _run(command: Callable[[], Any], future: Future[Any] | None) -> None:
    """A command with a future gives its error to the future; the error of one without ends the
    loop.
    """
    if future is None:
        command()
        return
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = command()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
