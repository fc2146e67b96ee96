"""Finds what stands still: a process that is stopped or silent, a loop that is blocked, work that takes no processor time, an engine that
does not come back from quarantine, and a run in which nothing moves. Synchronous: `Ring` looks every second, and acts.

| found | when |
|---|---|
| stopped | the process is in state T, and its last beat is `stall_seconds` old |
| silent | its last beat is as old; older, where what it did may hold the interpreter |
| blocked | it beats, but its event loop has not turned for as long |
| idle | what it does takes processor time, and took none for as long |
| absent | an engine is in quarantine for as long, started before that, and a trainer could have brought it weights all the time |
| standing | nothing has moved for as long (a counter of the run, a part that began), and no limit of anything that is done has time left |
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from midflight.allowance import SenderClock
from midflight.observe.status import duration
from midflight.run.heart import Beat, Doing

LOOK_SECONDS = 1.0
"""Between two looks of the launcher."""
IDLE_SHARE = 0.01
"""Of a core: a process that uses less computes nothing. Its heart takes a thousandth."""
REST_SECONDS = 2.0
"""Later than the other findings: whoever computes nothing may wait for a process that is found to be stopped in a moment."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the system says of a process: its state's letter, and its processor seconds."""

    state: str
    cpu_seconds: float


def vitals_of(pid: int) -> Vitals:
    """Where there is no /proc, a process that runs and never computes."""
    try:
        # The command's name, in brackets, may itself hold brackets and spaces: the fields start after the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Vitals("?", 0.0)
    return Vitals(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


class Pulse:
    """What is known of one process. `now` is CLOCK_MONOTONIC everywhere. Without a `pid` it is where only its beats are seen of it."""

    def __init__(self, name: str, pid: int | None, *, now: float) -> None:
        self.name, self.pid = name, pid
        self.began = self.heard = now
        self.ready: float | None = None
        """Since when it serves; none before."""
        self.beat = Beat(None)
        self.state = "?"
        self._cpu_seconds, self.computed = 0.0, now
        self._clock = SenderClock()

    def hear(self, beat: Beat, *, now: float) -> None:
        self.beat, self.heard = beat if beat.at is None else beat.shifted(self._clock.shift(beat.at, now=now)), now
        if self.pid is None:
            self.feel(Vitals("?", beat.cpu_seconds), now=now)

    def feel(self, vitals: Vitals, *, now: float) -> None:
        self.state = vitals.state
        if vitals.cpu_seconds - self._cpu_seconds > max(0.03, IDLE_SHARE * (now - self.computed)):
            self._cpu_seconds, self.computed = vitals.cpu_seconds, now

    def excuse(self, seconds: float) -> None:
        """The launcher itself stood for so long."""
        self.heard += seconds
        self.computed += seconds


@dataclass(frozen=True, slots=True)
class Hung:
    """A process to be ended, and why."""

    name: str
    why: str
    stopped: bool = False
    """It cannot show its stacks."""


class Watchdog:
    """See the module. `pulses` are of the processes that run, by name."""

    def __init__(self, *, stall_seconds: float, vitals: Callable[[int], Vitals] = vitals_of, clock: Callable[[], float] = time.monotonic):
        self._stall_seconds, self._vitals, self._clock = stall_seconds, vitals, clock
        self.pulses: dict[str, Pulse] = {}
        self._looked: float | None = None
        self._counters: object = None
        self._moved = clock()
        self._report_after = stall_seconds
        self._weights: float | None = clock()
        """Since when somebody hands weights out; none while the trainer is away."""

    # --- What it hears -----------------------------------------------------------------------------------------------

    def begin(self, name: str, pid: int | None) -> None:
        """`pid` is of this machine; None where the process is on another."""
        self.pulses[name] = Pulse(name, pid, now=self._clock())
        self._move()

    def end(self, name: str) -> None:
        """The process has ended, or is about to: nothing is found of it any more."""
        self.pulses.pop(name, None)

    def hear(self, name: str, beat: Beat) -> None:
        if (pulse := self.pulses.get(name)) is not None:
            now, still = self._clock(), {doing.what for doing in beat.doing}
            if any(doing.excused(now) and doing.what not in still for doing in pulse.beat.doing):
                self._move()
            pulse.hear(beat, now=now)

    def ready(self, name: str) -> None:
        if (pulse := self.pulses.get(name)) is not None:
            pulse.ready = self._clock()

    def weights_lost(self) -> None:
        """The trainer has ended: no engine can be blamed for not coming back."""
        self._weights = None

    def weights_found(self) -> None:
        self._weights = self._clock()

    def progress(self, counters: object) -> None:
        """How far the run is, in any form that can be compared. While it stays equal nothing moves but parts that begin, or end what may take
        long."""
        if counters != self._counters:
            self._counters = counters
            self._move()

    def _move(self) -> None:
        self._moved, self._report_after = self._clock(), self._stall_seconds

    # --- What it finds -----------------------------------------------------------------------------------------------

    def look(self) -> Sequence[Hung]:
        """Those to be ended now. Not more often than they can be: whoever was found is to be given to `end`."""
        now = self._clock()
        late = 0.0 if self._looked is None else now - self._looked - LOOK_SECONDS
        self._looked = now
        if late > LOOK_SECONDS:  # this process stood, or the machine: nothing can be said of the others
            self._moved += late
            for pulse in self.pulses.values():
                pulse.excuse(late)
            return ()
        for pulse in self.pulses.values():
            if pulse.pid is not None:
                pulse.feel(self._vitals(pulse.pid), now=now)
        for judge in (self._unheard, self._blocked, self._absent, self._idle):
            if found := [hung for pulse in self.pulses.values() if (hung := judge(pulse, now)) is not None]:
                return found
        return self._standing(now)

    def due(self) -> bool:
        """Whether a report is due of a run in which nothing moves though something waits: after `stall_seconds`, then at twice the time."""
        waits = any(doing.whom for pulse in self.pulses.values() for doing in pulse.beat.doing)
        if not waits or self.stood() < self._report_after:
            return False
        self._report_after = 2 * self.stood()
        return True

    def stood(self) -> float:
        """Seconds since anything moved."""
        return self._clock() - self._moved

    def _allowed(self, pulse: Pulse) -> float:
        return max(self._stall_seconds, *(doing.limit or 0.0 for doing in pulse.beat.doing if doing.heavy), 0.0)

    def _unheard(self, pulse: Pulse, now: float) -> Hung | None:
        silent, stopped = now - pulse.heard, pulse.state == "T"
        if pulse.state == "t" or silent < (self._stall_seconds if stopped else self._allowed(pulse)):
            return None
        if stopped:
            return Hung(pulse.name, f"{pulse.name} is stopped (SIGSTOP) since {silent:.0f} s, so it has no stacks to show", stopped=True)
        return Hung(pulse.name, f"{pulse.name} was not heard of for {silent:.0f} s: it holds the interpreter, or cannot run")

    def _blocked(self, pulse: Pulse, now: float) -> Hung | None:
        turned = pulse.beat.turned
        if turned is None or pulse.heard - turned < self._allowed(pulse):
            return None
        return Hung(pulse.name, f"{pulse.name}'s event loop is blocked since {now - turned:.0f} s, by a call that does not return")

    def _idle(self, pulse: Pulse, now: float) -> Hung | None:
        for doing in pulse.beat.doing:
            seconds = now - max(doing.since, pulse.computed)
            if doing.computes and now - doing.since >= (doing.limit or 0.0) and seconds >= self._stall_seconds + REST_SECONDS:
                return Hung(pulse.name, f"{pulse.name} {doing.what} and took no processor time for {seconds:.0f} s")
        return None

    def _absent(self, pulse: Pulse, now: float) -> Hung | None:
        """`pulse` is of an engine, and the absence is known to the process that routes to it."""
        if pulse.ready is None or self._weights is None:
            return None
        for absence in (a for p in self.pulses.values() for a in p.beat.absences if a.engine == pulse.name):
            seconds = now - max(absence.since, pulse.ready, self._weights)
            if seconds >= self._stall_seconds:
                return Hung(pulse.name, f"{pulse.name} was in quarantine for {seconds:.0f} s: {absence.error}")
        return None

    def _standing(self, now: float) -> Sequence[Hung]:
        """Nothing moves, nothing that is done may last longer, and nobody outside is waited for. To blame is the last of those who wait."""
        every = [doing for pulse in self.pulses.values() for doing in pulse.beat.doing]
        waits = [pulse.name for pulse in self.pulses.values() for doing in pulse.beat.doing if doing.whom]
        if (
            now - self._moved < self._stall_seconds + REST_SECONDS
            or not waits
            or any(doing.excused(now) or (doing.whom and doing.whom not in self.pulses) for doing in every)
        ):
            return ()
        culprit = self._last_of(waits[0])
        return [Hung(culprit, f"nothing has moved for {duration(now - self._moved)}, and the others wait for {culprit}")]

    def _last_of(self, name: str) -> str:
        seen: list[str] = []
        while name not in seen:
            seen.append(name)
            whom = [doing.whom for doing in self.pulses[name].beat.doing if doing.whom in self.pulses]
            name = whom[0] if whom else name
        return seen[-1]

    # --- What it says ------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """Who does what and waits for whom, with ages."""
        now = self._clock()
        return "\n".join(line for pulse in self.pulses.values() for line in _lines(pulse, now))


def _lines(pulse: Pulse, now: float) -> list[str]:
    beat = pulse.beat
    head = f"  {pulse.name}: last heard of {now - pulse.heard:.0f} s ago"
    if beat.turned is not None and pulse.heard - beat.turned > 2 * LOOK_SECONDS:
        head += f", its loop turned {now - beat.turned:.0f} s ago"
    lines = [head + (f"; {beat.counters}" if beat.counters else "")]
    lines += [f"    {_said(doing, now)}" for doing in beat.doing]
    lines += [f"    {absence.engine} is in quarantine since {now - absence.since:.0f} s: {absence.error}" for absence in beat.absences]
    return lines


def _said(doing: Doing, now: float) -> str:
    of = f" of {doing.limit:.0f} s" if doing.limit is not None and doing.limit < 1e6 else " s"
    return f"{doing.what}, since {now - doing.since:.0f}{of}"
