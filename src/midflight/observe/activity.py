"""Tells whether a process moves. A wait for a process goes on as long as the process moves, however
slow or busy the machine is.

A process moves when it or one of its descendants takes processor time, reads or writes, waits for a
processor that others have, or says something. A process that does none of this for long hangs.
Without /proc every process counts as moving.
"""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from midflight.observe.memory import PROC, descendants, stat_of

COMPUTES_SHARE = 0.01
"""The share of a core below which a process counts as idle. Threads that only look around take
less.
"""
BYTES_A_SECOND = 16 * 1024
"""The bytes per second below which a process only shows that it is there, by heartbeats for
instance.
"""
BLIND_SECONDS = 5.0
"""After a longer time between two looks, this process itself stood still, and the time says nothing
about the other process.
"""


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """The work that a process has done since it began, alone or together with its descendants."""

    cpu_seconds: float
    num_bytes: int
    """Bytes that were read and written, including pages that were read in when they were
    touched.
    """
    state: str = "?"
    """The letter of the process's state, or `?` if the system does not tell. With descendants it
    is `R` if any of the processes is ready to run.
    """

    @property
    def is_runnable(self) -> bool:
        return self.state == "R"


def motion(before: ProcessWork, work: ProcessWork, *, seconds: float) -> str | None:
    """Returns what a process has done within `seconds`, as a verb, or None if that is so little
    that the process only shows that it is there.
    """
    computed = work.cpu_seconds - before.cpu_seconds
    moved_bytes = work.num_bytes - before.num_bytes
    if computed > max(0.03, COMPUTES_SHARE * seconds):
        return "takes processor time"
    if moved_bytes > BYTES_A_SECOND * max(1.0, seconds):
        return "reads and writes"
    if computed < 0 or moved_bytes < 0:
        return "has ended a part of itself"
    return None


def work_of(pid: int, *, proc: Path = PROC) -> ProcessWork | None:
    """The work of a process and its descendants, or None if there is no /proc."""
    if not proc.is_dir():
        return None
    cpu_seconds = 0.0
    num_bytes = 0
    state = "?"
    for member in descendants(pid, proc=proc):
        work = own_work(member, proc=proc)
        if work is not None:
            cpu_seconds += work.cpu_seconds
            num_bytes += work.num_bytes
            if state != "R":
                state = work.state
    return ProcessWork(cpu_seconds, num_bytes, state)


def own_work(pid: int, *, proc: Path = PROC) -> ProcessWork | None:
    """The work of one process and of its descendants that have ended, or None if it has ended
    itself or there is no /proc.
    """
    fields = stat_of(pid, proc=proc)
    if not fields:
        return None
    ticks = sum(map(int, fields[11:15]))
    faults = int(fields[9]) + int(fields[10])
    return ProcessWork(
        ticks / os.sysconf("SC_CLK_TCK"),
        num_bytes_of(pid, proc=proc) + faults * resource.getpagesize(),
        fields[0],
    )


def num_bytes_of(pid: int | str, *, proc: Path = PROC) -> int:
    """The bytes that a process has read and written; `self` is this process. It is 0 if the kernel
    does not tell, for instance for a process of another user.
    """
    try:
        lines = (proc / str(pid) / "io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])


class WorkBelow:
    """The processor seconds and bytes of this process and its descendants so far. It looks at all
    processes of the machine, and therefore only once in `seconds`.
    """

    def __init__(self, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._looked: float | None = None
        self._found = (0.0, 0)

    def __call__(self) -> tuple[float, int]:
        now = self._clock()
        if self._looked is None or now - self._looked >= self._seconds:
            self._looked = now
            work = work_of(os.getpid())
            if work is not None:
                self._found = (work.cpu_seconds, work.num_bytes)
        return self._found


class ActivityProbe:
    """Tells whether a process or one of its descendants has worked since the last call. It is for
    callers that ask now and then; for others there is `ProcessActivity`.

    The first answer is yes, because nothing is known about the time before.
    """

    def __init__(
        self,
        pid: int,
        *,
        work: Callable[[int], ProcessWork | None] = work_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._work = work
        self._clock = clock
        self._before: ProcessWork | None = None
        self._asked = 0.0

    def __call__(self) -> bool:
        work = self._work(self._pid)
        before = self._before
        now = self._clock()
        seconds = now - self._asked
        self._before = work
        self._asked = now
        if work is None or before is None:
            return True
        if work.is_runnable and before.is_runnable:
            return True  # it waits for a processor
        return motion(before, work, seconds=seconds) is not None


class ProcessActivity:
    """Watches whether one process moves. It is synchronous: the code that waits for the process
    calls `look` about once a second.
    """

    def __init__(
        self,
        pid: int,
        *,
        work: Callable[[int], ProcessWork | None] = work_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._work = work
        self._clock = clock
        self.began = self._looked = self._moved = clock()
        self._before: ProcessWork | None = work(pid)
        self._was_runnable = False
        self._said = ""
        self.what = "takes processor time"
        """The process's last activity, as a verb."""

    @property
    def seconds(self) -> float:
        """The seconds since it began to watch the process."""
        return self._clock() - self.began

    def look(self, said: str = "") -> float:
        """Seconds since the process moved last. `said` is the last message of the process: a new
        message is motion.
        """
        now = self._clock()
        if now - self._looked > BLIND_SECONDS:
            self._moved += now - self._looked
        self._looked = now
        what = self._moves(said, now)
        if what is not None:
            self.what = what
            self._moved = now
        return now - self._moved

    def _moves(self, said: str, now: float) -> str | None:
        """Returns the process's activity, as a verb, or None if it does nothing that counts."""
        work = self._work(self._pid)
        before = self._before
        if work is None or before is None:
            return "is under way"
        has_spoken = said != self._said
        # Once is not enough: a process that only looks around is seen runnable by chance.
        is_starved = work.is_runnable and self._was_runnable
        self._said = said
        self._was_runnable = work.is_runnable
        what = motion(before, work, seconds=now - self._moved)
        if what is None and is_starved:
            what = "waits for a processor"
        elif what is None and has_spoken:
            what = "goes on"
        if what is not None:
            self._before = work
        return what
