"""What a part of a run does and waits for, told to the launcher every second, so that one that
stands still is found. Torch-free.

A part beats from a thread, so that the launcher hears of it while its event loop is blocked; each
beat says when the loop last turned. A process that is stopped, or that holds the interpreter, does
not beat at all. Times are CLOCK_MONOTONIC seconds of its machine.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec

from midflight.observe.motion import num_bytes_of

BEAT_SECONDS = 1.0
"""Between two beats: a small part of any `run.stall_seconds`, and too seldom to cost anything."""
START_SECONDS = 600.0
"""For imports, and for a model to be made or loaded: so long each may hold the interpreter, and
longer as long as it computes or reads.
"""
ENDLESS = 1e9
"""The limit of what may stand as long as somebody wishes, such as an operator's pause. JSON has no
infinity.
"""


class Doing(msgspec.Struct, frozen=True):
    """Something that a part does or waits for now, as a verb with its object: `makes step 7`,
    `waits for the batch of version 7`.
    """

    what: str
    since: float
    whom: str = ""
    """The part that it waits for."""
    limit: float | None = None
    """Seconds that it may take. Without a limit it is no excuse for a standstill."""
    computes: bool = False
    """It takes processor time, or reads and writes, all along, and may take long: past its limit,
    if it has one, it hangs when it does neither."""
    heavy: bool = False
    """It may hold the interpreter or the loop for as long as its limit, as imports and models that
    are loaded do.
    """
    holds_loop: bool = False
    """It holds the event loop, and others judge for how long it may."""

    def excused(self, now: float) -> bool:
        """Whether it may still last."""
        return self.computes or (self.limit is not None and now - self.since < self.limit)


class Absence(msgspec.Struct, frozen=True):
    """An engine has been in quarantine since then."""

    engine: str
    since: float
    error: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A part lives."""

    turned: float | None
    """When its event loop last turned; none before it has one."""
    doing: tuple[Doing, ...] = ()
    absences: tuple[Absence, ...] = ()
    counters: str = ""
    """What it has to do, in a few words."""
    at: float | None = None
    """When it was sent; none where its times are of the hearer's clock."""
    cpu_seconds: float = 0.0
    """Of processor time, since its start."""
    num_bytes: int = 0
    """That it read and wrote since its start."""
    memory_bytes: int = 0
    """Of it and what is below it, where the launcher cannot look for itself."""

    def shifted(self, seconds: float) -> "Beat":
        """With its times on a clock that shows so much more."""
        return msgspec.structs.replace(
            self,
            turned=None if self.turned is None else self.turned + seconds,
            doing=tuple(
                msgspec.structs.replace(one, since=one.since + seconds) for one in self.doing
            ),
            absences=tuple(
                msgspec.structs.replace(one, since=one.since + seconds) for one in self.absences
            ),
        )


class Situation(msgspec.Struct, frozen=True):
    """What a part can say of itself only on its event loop."""

    doing: tuple[Doing, ...] = ()
    absences: tuple[Absence, ...] = ()
    counters: str = ""


class Heart:
    """Beats, once it is started. What is done and waited for is entered by `doing`, from any
    thread; or read by `ask` on the loop.
    """

    def __init__(self, tell: Callable[[Beat], None] = lambda _: None) -> None:
        self._tell = tell
        self._doing: dict[int, Doing] = {}
        self._numbers = iter(range(2**62))
        self._turned: float | None = None
        self._standing = Situation()
        self.ask: Callable[[], Situation] = Situation
        """Called on the loop before each beat; must not wait."""
        self.beside: Callable[[], tuple[Doing, ...]] = tuple
        """Called before each beat, beside the loop: what is known of the loop while that is
        blocked.
        """
        self.work: Callable[[], tuple[float, int]] = lambda: (
            time.process_time(),
            num_bytes_of("self"),
        )
        """Processor seconds and bytes so far. Called before each beat, beside the loop. What is
        below the process may count.
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
        """From now on, until the process ends."""
        threading.Thread(target=self._beat_on, name="heart", daemon=True).start()

    def turn(self) -> None:
        """On the running loop, now and every second until the loop ends."""
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self.turn)
        self._turned = time.monotonic()
        self._standing = self.ask()

    def _beat_on(self) -> None:
        """Waits for the second to pass; ended by the process's end."""
        pause = threading.Event()
        while True:
            self._tell(self.beat())
            pause.wait(BEAT_SECONDS)
