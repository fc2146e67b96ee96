"""An asyncio event loop whose time is virtual. Waiting costs nothing, and a wait that nothing can
end fails at once.

Whenever no callback is ready the clock jumps to the next timer. If there is no timer either,
nothing can ever happen again, so the run ends with `DeadlockError`, which names the place at which
each task waits. There is no real input or output, and `to_thread` runs inline. The loop waits for a
thread that the code starts itself before time passes: as long as it computes, the clock stands
still. Two runs of the same code make the same steps. With a seed the ready callbacks of one instant
run in a shuffled order, which is the same for the same seed.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import heapq
import linecache
import random
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from types import CoroutineType, FrameType, GeneratorType
from typing import Any, NoReturn, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_SECONDS = 1e6
"""A run that takes more virtual seconds counts as hung: a periodic timer would otherwise keep a
deadlock alive for ever.
"""
MAX_ROUNDS_PER_INSTANT = 5_000_000
"""A run whose loop makes more rounds without any passing of time counts as spinning."""

THREAD_LOOK_SECONDS = 0.002
"""Real seconds between two looks at threads that may still have something to say."""


class DeadlockError(AssertionError):
    """Nothing can happen any more (or time passes with no end), and the main coroutine has not
    finished.
    """


class LeakedTasks(AssertionError):
    """Tasks were still running when the main coroutine had ended: something was started outside a
    task group.
    """


class NotVirtual(RuntimeError):
    """Sockets, pipes, signals, processes or threads were asked of a loop that has only time."""


class _OrderedTask(asyncio.Task[T]):
    """A task that hashes by its creation order, so that sets of tasks (as in `TaskGroup`) iterate
    alike in every run.
    """

    def __init__(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        loop: VirtualTimeLoop,
        **options: Any,
    ) -> None:
        self.sequence = loop.next_sequence()
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.sequence


@dataclass(frozen=True, slots=True)
class _ThreadWork:
    """The state of a thread of this process: whether it computes or waits for a core, and for how
    long it has computed.
    """

    runnable: bool
    nanoseconds: int

    @classmethod
    def of(cls, thread: int) -> _ThreadWork:
        """A thread that has ended counts as waiting, and so does every thread on a system without
        `/proc`.
        """
        folder = Path(f"/proc/self/task/{thread}")
        try:
            state = (folder / "stat").read_text(errors="replace").rpartition(") ")[2][0]
            return cls(state == "R", int((folder / "schedstat").read_text().split()[0]))
        except (OSError, IndexError, ValueError):
            return cls(runnable=False, nanoseconds=0)


class VirtualTimeLoop(asyncio.base_events.BaseEventLoop):
    """The loop that the module describes. Without a seed, callbacks and timers of one instant run
    in the order in which they were scheduled.
    """

    def __init__(self, *, seed: int | None = None, max_seconds: float = MAX_SECONDS) -> None:
        super().__init__()
        self._now = 0.0
        self._max_seconds = max_seconds
        self._sequence = 0
        self._rounds_now = 0
        self._due: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._compact_at = 1000
        self._random = None if seed is None else random.Random(seed)
        self._threads_before = set(threading.enumerate())
        self._threads_work: dict[int, _ThreadWork] = {}
        """The state at the last look of each thread that was started since this loop was made, by
        its number.
        """
        self._called_by_thread = threading.Event()
        self.failures: list[BaseException] = []
        """Exceptions that nothing awaited: those of callbacks, and of tasks that were dropped
        without a look at their result.
        """
        self.set_task_factory(_ordered_task)
        self.set_exception_handler(_record_failure)

    def time(self) -> float:
        return self._now

    def block(self, seconds: float) -> None:
        """Lets time pass while nothing else happens, as in a callback that calls `time.sleep`."""
        self._now += seconds

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = self.call_soon(callback, *args, context=context)
        self._called_by_thread.set()
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self.next_sequence(), timer))
        if len(self._timers) > self._compact_at:
            self._forget_cancelled()
        return timer

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Runs `func` in a callback of this instant. Like a thread that has begun, it runs to its
        end even if nothing waits for it any more.
        """
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_soon(work)
        return future

    def stop(self) -> None:
        super().stop()
        self.call_soon(_nothing)  # a round with nothing to run would count as a hang

    def pending(self) -> list[asyncio.Task[Any]]:
        """Unfinished tasks in the order they were created."""
        return sorted(asyncio.all_tasks(self), key=hash)

    def _run_once(self) -> None:
        if not self._due:
            self._hear_threads()
        if not self._due:
            self._jump()
        while self._timers and self._timers[0][0] <= self._now:
            self._due.append(heapq.heappop(self._timers)[2])
        self._rounds_now += 1
        if self._rounds_now > MAX_ROUNDS_PER_INSTANT:
            what = f"{MAX_ROUNDS_PER_INSTANT} rounds without any passing of time: something spins"
            raise DeadlockError(self._report(what))
        for handle in self._take():
            if not handle.cancelled():
                handle._run()  # pyright: ignore[reportPrivateUsage]

    def _hear_threads(self) -> None:
        """Waits until a thread that was started since this loop was made calls, or until all such
        threads wait for something themselves.
        """
        while not self._due:
            threads = set(threading.enumerate()) - self._threads_before
            if not threads:
                return
            before = self._threads_work
            self._threads_work = {
                thread.native_id: _ThreadWork.of(thread.native_id)
                for thread in threads
                if thread.native_id is not None
            }
            if self._threads_work == before and not any(work.runnable for work in before.values()):
                return
            self._called_by_thread.wait(THREAD_LOOK_SECONDS)
            self._called_by_thread.clear()

    def _jump(self) -> None:
        """Moves the clock to the next timer; nothing is ready before it."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            what = "Nothing is ready, no timer is set: nothing can happen any more"
            raise DeadlockError(self._report(what))
        if self._timers[0][0] > self._now:
            self._now = self._timers[0][0]
            self._rounds_now = 0
        if self._now > self._max_seconds:
            raise DeadlockError(
                self._report(f"More than {self._max_seconds:g} virtual seconds have passed")
            )

    def _take(self) -> list[asyncio.Handle]:
        """The callbacks of this round: all that are ready, or with a seed a random part of them in
        random order.
        """
        taken = self._due
        self._due = []
        if self._random is not None and len(taken) > 1:
            self._random.shuffle(taken)
            cut = self._random.randint(1, len(taken))
            self._due = taken[cut:]
            taken = taken[:cut]
        return taken

    def _forget_cancelled(self) -> None:
        """Sweeps cancelled timers, which deadlines that were met leave far in the future. It is
        done when there are twice as many timers as live ones.
        """
        self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
        heapq.heapify(self._timers)
        self._compact_at = max(1000, 2 * len(self._timers))

    def _report(self, what: str) -> str:
        tasks = self.pending()
        lines = [f"{what} (t={self._now:g} s, {len(tasks)} tasks pending)."]
        return "\n".join(lines + [describe(task) for task in tasks])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: cancelled timers are dropped when their turn comes."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotVirtual(
            "Virtual time has no sockets, pipes, signals or processes: use an in-memory transport, "
            "or a real loop for this test."
        )

    create_connection = _refuse
    create_server = _refuse
    getaddrinfo = _refuse
    create_datagram_endpoint = _refuse
    create_unix_connection = _refuse
    create_unix_server = _refuse
    add_reader = _refuse  # pyright: ignore[reportAssignmentType]
    add_writer = _refuse  # pyright: ignore[reportAssignmentType]
    add_signal_handler = _refuse  # pyright: ignore[reportAssignmentType]
    subprocess_exec = _refuse
    subprocess_shell = _refuse


def run_virtual(
    main: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]],
    *,
    seed: int | None = None,
    max_seconds: float = MAX_SECONDS,
) -> T:
    """Runs a coroutine (or an async function without arguments) to its end on a fresh virtual clock
    that starts at 0.

    Raises the coroutine's own error, `DeadlockError` if it cannot end, and `LeakedTasks` if it left
    tasks behind, which are cancelled first. Raises the error of a callback or an unobserved task,
    too. With a seed, every failure carries a note with that seed.
    """
    loop = VirtualTimeLoop(seed=seed, max_seconds=max_seconds)
    try:
        return _run(loop, main() if callable(main) else main)
    except BaseException as error:
        if seed is not None:
            error.add_note(f"Replay this interleaving with seed={seed}.")
        raise
    finally:
        loop.close()


def _run(loop: VirtualTimeLoop, main: Coroutine[Any, Any, T]) -> T:
    try:
        result = loop.run_until_complete(main)
    except BaseException:
        _end_leftovers(loop)
        raise
    leaked = [describe(task) for task in loop.pending()]
    _end_leftovers(loop)
    if leaked:
        raise LeakedTasks(f"{len(leaked)} tasks outlived the main coroutine.\n" + "\n".join(leaked))
    if loop.failures:
        raise loop.failures[0]
    return result


def _end_leftovers(loop: VirtualTimeLoop) -> None:
    """Cancels the remaining tasks and lets them clean up. Tasks that refuse to end are abandoned,
    because the run has failed anyway.
    """
    leftovers = loop.pending()
    for task in leftovers:
        task.cancel()
    try:
        loop.run_until_complete(_settle(leftovers))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except DeadlockError:
        loop.failures.clear()


async def _settle(tasks: list[asyncio.Task[Any]]) -> None:
    """Waits for cancelled tasks to end."""
    await asyncio.gather(*tasks, return_exceptions=True)


def describe(task: asyncio.Task[Any]) -> str:
    """A task's name and, from the outermost call to the innermost, the lines at which it is
    suspended.
    """
    waiter = getattr(task, "_fut_waiter", None)
    state = "ready to run" if waiter is None else f"waiting for {waiter!r}"
    lines = [f"  {task.get_name()}, {state}:"]
    for frame in _suspended_frames(task.get_coro()):
        code = frame.f_code
        source = linecache.getline(code.co_filename, frame.f_lineno).strip()
        lines.append(f"    {code.co_filename}:{frame.f_lineno} in {code.co_qualname}: {source}")
    return "\n".join(lines)


def _suspended_frames(awaited: object) -> list[FrameType]:
    """Follows `await` from a coroutine to the innermost frame. An object that is neither a
    coroutine nor a generator ends the chain.
    """
    frames: list[FrameType | None] = []
    while awaited is not None:
        if isinstance(awaited, CoroutineType):
            frames.append(awaited.cr_frame)
            awaited = awaited.cr_await
        elif isinstance(awaited, GeneratorType):
            frames.append(awaited.gi_frame)
            awaited = awaited.gi_yieldfrom
        else:
            break
    return [frame for frame in frames if frame is not None]


def _ordered_task(
    loop: asyncio.AbstractEventLoop,
    coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
    **options: Any,
) -> asyncio.Future[T]:
    assert isinstance(loop, VirtualTimeLoop)
    return _OrderedTask(coro, loop=loop, **options)


def _record_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Records the failure of a callback, a task or a generator. A future whose error was not read
    is only logged, because giving up on a wait is no failure.
    """
    assert isinstance(loop, VirtualTimeLoop)
    error = context.get("exception")
    is_failure = "handle" in context or "task" in context or "asyncgen" in context
    if isinstance(error, BaseException) and is_failure:
        loop.failures.append(error)
    else:
        loop.default_exception_handler(context)


def _nothing() -> None: ...


__all__ = [
    "DeadlockError",
    "LeakedTasks",
    "NotVirtual",
    "VirtualTimeLoop",
    "describe",
    "run_virtual",
]
