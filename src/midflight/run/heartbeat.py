"""The heartbeat of a part: every second it tells the launcher what it does and waits for, so that
the launcher notices a part that stands still. The module does not import torch.

A part beats from a thread, so that the launcher hears of it while its event loop is blocked. Each
beat says when the loop last turned. A process that is stopped, or that holds the interpreter, does
not beat at all. Times are CLOCK_MONOTONIC seconds of the part's machine.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec

from midflight.observe.activity import num_bytes_of

BEAT_SECONDS = 1.0
"""The time between two beats: a small part of any `run.stall_seconds`, and too seldom to cost
anything.
"""
START_SECONDS = 600.0
"""The limit of imports, and of a model that is made or loaded. The seconds that each may hold the
interpreter. It may take longer while it computes or reads.
"""
ENDLESS = 1e9
"""The limit of a wait that has none, such as an operator's pause. JSON has no infinity."""


class Doing(msgspec.Struct, frozen=True):
    """Something that a part does or waits for now, as a verb with its object: `makes step 7`,
    `waits for the batch of version 7`.
    """

    what: str
    since: float
    whom: str = ""
    """The part that this waits for."""
    limit: float | None = None
    """The seconds that it may take. Without a limit it is no excuse for a standstill."""
    computes: bool = False
    """It takes processor time, or reads and writes, all along, and may take long. It hangs when it
    does neither after its limit, if it has one.
    """
    heavy: bool = False
    """It may hold the interpreter or the loop for as long as its limit, as imports and models that
    are loaded do.
    """
    holds_loop: bool = False
    """It holds the event loop, and another part judges for how long it may."""

    def excused(self, now: float) -> bool:
        """True if it may still last."""
        return self.computes or (self.limit is not None and now - self.since < self.limit)


class Absence(msgspec.Struct, frozen=True):
    """An engine has been in quarantine since `since`."""

    engine: str
    since: float
    error: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A part lives."""

    turned: float | None
    """The time at which its event loop last turned, or None before it has one."""
    doing: tuple[Doing, ...] = ()
    absences: tuple[Absence, ...] = ()
    counters: str = ""
    """The part's outstanding work, in a few words."""
    at: float | None = None
    """The time at which the beat was sent, or None if its times are already of the receiver's
    clock.
    """
    cpu_seconds: float = 0.0
    """The processor time of the part since its start."""
    num_bytes: int = 0
    """The bytes that the part read and wrote since its start."""
    memory_bytes: int = 0
    """The memory of the part and of its children, if the launcher cannot read it itself."""

    def shifted(self, seconds: float) -> "Beat":
        """Returns the same beat with its times on a clock that is ahead by `seconds`."""
        replaced = msgspec.structs.replace
        turned = None if self.turned is None else self.turned + seconds
        doing = tuple(replaced(one, since=one.since + seconds) for one in self.doing)
        absences = tuple(replaced(one, since=one.since + seconds) for one in self.absences)
        return replaced(self, turned=turned, doing=doing, absences=absences)


class LoopReport(msgspec.Struct, frozen=True):
    """The things that a part can say of itself only on its event loop."""

    doing: tuple[Doing, ...] = ()
    absences: tuple[Absence, ...] = ()
    counters: str = ""


def _own_work() -> tuple[float, int]:
    return time.process_time(), num_bytes_of("self")


class Heartbeat:
    """Beats, once it is started. Work and waits are entered by `doing`, from any thread, or read by
    `ask` on the event loop.
    """

    def __init__(self, tell: Callable[[Beat], None] = lambda _: None) -> None:
        self._tell = tell
        self._doing: dict[int, Doing] = {}
        self._numbers = iter(range(2**62))
        self._turned: float | None = None
        self._standing = LoopReport()
        self.ask: Callable[[], LoopReport] = LoopReport
        """Called on the event loop every second; must not wait."""
        self.beside: Callable[[], tuple[Doing, ...]] = tuple
        """Called before each beat, in the beat's thread. Returns work that is known to be under way
        while the loop is blocked.
        """
        self.work: Callable[[], tuple[float, int]] = _own_work
        """Called before each beat, beside the loop: returns processor seconds and bytes so far. The
        process's children may count.
        """
        self.memory: Callable[[], int] = lambda: 0
        """Called before each beat, beside the loop. Takes some milliseconds of a core."""

    @contextmanager
    def doing(
        self,
        what: str,
        *,
        whom: str = "",
        limit: float | None = None,
        computes: bool = False,
        heavy: bool = False,
    ) -> Generator[None]:
        number = next(self._numbers)
        self._doing[number] = Doing(what, time.monotonic(), whom, limit, computes, heavy)
        try:
            yield
        finally:
            del self._doing[number]

    def beat(self) -> Beat:
        standing = self._standing
        doing = (*self.beside(), *self._doing.copy().values(), *standing.doing)
        cpu_seconds, num_bytes = self.work()
        return Beat(
            self._turned,
            doing,
            standing.absences,
            standing.counters,
            time.monotonic(),
            cpu_seconds,
            num_bytes=num_bytes,
            memory_bytes=self.memory(),
        )

    def start(self) -> None:
        """Beats from now on, until the process ends."""
        threading.Thread(target=self._beat_on, name="heartbeat", daemon=True).start()

    def turn(self) -> None:
        """Notes that the running loop turns, now and every second until the loop ends."""
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self.turn)
        self._turned = time.monotonic()
        self._standing = self.ask()

    def _beat_on(self) -> None:
        """Waits for the second to pass; ended by the process's end."""
        pause = threading.Event()
        while True:
            self._tell(self.beat())
            pause.wait(BEAT_SECONDS)
