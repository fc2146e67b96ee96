"""The signs of life of one process. It is synchronous."""

from midflight.lateness import Lateness
from midflight.observe.activity import ProcessWork, motion
from midflight.run.heartbeat import BEAT_SECONDS, Beat
from midflight.sender_clock import SenderClock


class Work:
    """The time at which a process has last worked, by one source. At first `at` is `now`."""

    def __init__(self, *, now: float) -> None:
        self.at = now
        self._before = ProcessWork(0.0, 0)

    def feel(self, work: ProcessWork, *, now: float) -> None:
        if motion(self._before, work, seconds=now - self.at) is not None:
            self._before = work
            self.at = now


class SignsOfLife:
    """The signs of life of one process. `now` is CLOCK_MONOTONIC everywhere. A process without a
    `pid` is on another machine, where only its beats are seen.
    """

    def __init__(self, name: str, pid: int | None, *, now: float, memory_seconds: float) -> None:
        self.name = name
        self.pid = pid
        self.heard = now
        self.ready: float | None = None
        """The time at which it began to serve. None before that."""
        self.beat = Beat(None)
        self.lateness = Lateness(BEAT_SECONDS, memory_seconds=memory_seconds)
        """The lateness of its beats. Beats before and after which it may have held the interpreter
        do not count.
        """
        self.state = "?"
        self.condemned: str | None = None
        """The reason why the rollout process asks for this process's end, or None if it does
        not.
        """
        self._seen = Work(now=now)
        """Its work, by the system's numbers."""
        self._told = Work(now=now)
        """Its work, by its own beats. They may count the processes below it."""
        self._clock = SenderClock()

    @property
    def computed(self) -> float:
        """The time at which it last took processor time, or read or wrote."""
        return max(self._seen.at, self._told.at)

    def hear(self, beat: Beat, *, now: float) -> None:
        is_heavy = any(doing.heavy for doing in (*self.beat.doing, *beat.doing))
        self.lateness.came(now, counts=not is_heavy)
        self.beat = beat if beat.at is None else beat.shifted(self._clock.shift(beat.at, now=now))
        self.heard = now
        self._told.feel(ProcessWork(beat.cpu_seconds, beat.num_bytes), now=now)

    def feel(self, work: ProcessWork, *, now: float) -> None:
        self.state = work.state
        self._seen.feel(work, now=now)
