"""Finds processes and parts that stand still: a process that is stopped or silent, a loop that is
blocked, work that takes no processor time, an engine that does not come back from quarantine, and a
run in which nothing moves. It is synchronous: `ProcessWatch` looks every second, and acts.

| found | when |
|---|---|
| condemned | the rollout process asks for the end of a worker |
| stopped | the process is in state T, and its last beat is `stall_seconds` old |
| silent | its last beat is as old; older, if its work may hold the interpreter |
| blocked | it beats, but its event loop has not turned for as long; not where an agent holds it, which the rollout process judges |
| idle | its work takes processor time or reads and writes, and did neither for as long |
| absent | an engine is in quarantine for as long, started before that, and a trainer could have brought it weights all the time |
| standing | nothing has moved for as long (a counter of the run, a part that began), and no work under way is still within its limit |

To each `stall_seconds` the measured delay of signs of life is added: that of this process, of half
of all parts, or of the part itself. A machine that is too busy to let a part beat in time is no
reason to end it.

Processes are judged here. Agents are judged by the pool of their rollout process, which knows their
deadlines and which agent blocks which.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midflight.lateness import Lateness, delay_of
from midflight.observe.activity import ProcessWork, own_work
from midflight.observe.readable import duration
from midflight.run.heartbeat import Beat, Doing
from midflight.run.launcher.signs_of_life import SignsOfLife

LOOK_SECONDS = 1.0
"""The time between two looks of the launcher."""
REST_SECONDS = 2.0
"""The delay of the findings `idle` and `standing`. A process that computes nothing may wait for one
that is found to be stopped a moment later.
"""
MEMORY = 4
"""The time for which a delay is remembered, as a multiple of `stall_seconds`. It is longer than the
beats of a slow process are apart.
"""


@dataclass(frozen=True, slots=True)
class HungProcess:
    """A process to be ended, and why."""

    name: str
    why: str
    stopped: bool = False
    """It cannot show its stacks."""


class Watchdog:
    """Judges processes by their signs of life; see the module. `pulses` are those of the processes
    that run, by name.
    """

    def __init__(
        self,
        *,
        stall_seconds: float,
        work: Callable[[int], ProcessWork | None] = own_work,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stall_seconds = stall_seconds
        self._work = work
        self._clock = clock
        self.pulses: dict[str, SignsOfLife] = {}
        self._ended: dict[str, float] = {}
        """The time at which each part ended that has not begun again."""
        self._looks = Lateness(LOOK_SECONDS, memory_seconds=MEMORY * stall_seconds)
        self._counters: object = None
        self._moved = clock()
        self._report_after = stall_seconds
        self._weights: float | None = clock()
        """The time at which a trainer began to hand weights out. None while the trainer is away."""

    # --- What it hears ----------------------------------------------------------------------------

    def begin(self, name: str, pid: int | None) -> None:
        """`pid` is a number of this machine, or None if the process is on another."""
        self.pulses[name] = SignsOfLife(
            name, pid, now=self._clock(), memory_seconds=MEMORY * self._stall_seconds
        )
        self._ended.pop(name, None)
        self._move()

    def end(self, name: str) -> None:
        """The process has ended, or is about to. It is no longer judged."""
        if self.pulses.pop(name, None) is not None:
            self._ended[name] = self._clock()

    def hear(self, name: str, beat: Beat) -> None:
        if (pulse := self.pulses.get(name)) is not None:
            now = self._clock()
            still = {doing.what for doing in beat.doing}
            if any(doing.excused(now) and doing.what not in still for doing in pulse.beat.doing):
                self._move()
            pulse.hear(beat, now=now)

    def see(self, name: str, state: str) -> None:
        """Takes the state of a process on another machine, as that machine says."""
        if (pulse := self.pulses.get(name)) is not None and pulse.pid is None:
            pulse.state = state

    def condemn(self, name: str, why: str) -> None:
        """Takes the rollout process's request to end a worker. It cannot see why a worker is
        silent; here that is known.
        """
        if (pulse := self.pulses.get(name)) is not None:
            pulse.condemned = why

    def ready(self, name: str) -> None:
        if (pulse := self.pulses.get(name)) is not None:
            pulse.ready = self._clock()

    def weights_lost(self) -> None:
        """Notes that the trainer has ended: then no engine can be blamed for not coming back."""
        self._weights = None

    def weights_found(self) -> None:
        self._weights = self._clock()

    def progress(self, counters: object) -> None:
        """Takes the progress of the run, in any form that can be compared. While it stays equal,
        nothing moves except parts that begin, or parts whose end may take long."""
        if counters != self._counters:
            self._counters = counters
            self._move()

    def _move(self) -> None:
        self._moved = self._clock()
        self._report_after = self._stall_seconds

    # --- What it finds ----------------------------------------------------------------------------

    def look(self) -> Sequence[HungProcess]:
        """The processes to be ended now. The caller gives each to `end`, so that none is found
        twice.
        """
        now = self._clock()
        self._looks.came(now)
        for pulse in self.pulses.values():
            work = None if pulse.pid is None else self._work(pulse.pid)
            if work is not None:
                pulse.feel(work, now=now)
        for judge in (self._condemned, self._unheard, self._blocked, self._absent, self._idle):
            judged = [judge(pulse, now) for pulse in self.pulses.values()]
            found = [hung for hung in judged if hung is not None]
            if found:
                return found
        return self._standing(now)

    def due(self) -> bool:
        """True if a report is due, because nothing moves in the run although some part waits. The
        first is due after `stall_seconds`, each further one at twice the time.
        """
        if not self._waits() or self.stood() < self._report_after:
            return False
        self._report_after = 2 * self.stood()
        return True

    def stood(self) -> float:
        """Seconds since anything moved."""
        return self._clock() - self._moved

    def _delay(self, now: float) -> float:
        """Returns the seconds by which all signs of life are late now."""
        return delay_of(self._looks, (pulse.lateness for pulse in self.pulses.values()), now)

    def _bound(self, pulse: SignsOfLife, now: float) -> float:
        """Returns the seconds without a sign of life after which a process hangs."""
        return self._stall_seconds + max(pulse.lateness.worst(now), self._delay(now))

    def _allowed(self, pulse: SignsOfLife, now: float) -> float:
        """Returns the seconds that a process may be silent, or its loop blocked. There is no limit
        while work that may hold the interpreter computes or reads.
        """
        heavy = [doing for doing in pulse.beat.doing if doing.heavy]
        bound = self._bound(pulse, now)
        if now - pulse.computed < bound and any(doing.computes for doing in heavy):
            return math.inf
        return max(bound, *(doing.limit or 0.0 for doing in heavy), 0.0)

    def _condemned(self, pulse: SignsOfLife, now: float) -> HungProcess | None:
        if pulse.condemned is None:
            return None
        return (
            _stopped(pulse, now) if pulse.state == "T" else HungProcess(pulse.name, pulse.condemned)
        )

    def _unheard(self, pulse: SignsOfLife, now: float) -> HungProcess | None:
        if pulse.state == "t":  # a debugger holds it
            return None
        silent = now - pulse.heard
        if pulse.state == "T":
            return None if silent < self._bound(pulse, now) else _stopped(pulse, now)
        if silent < self._allowed(pulse, now):
            return None
        why = (
            f"{pulse.name} was not heard of for {silent:.0f} s: it holds the interpreter, or "
            "cannot run"
        )
        return HungProcess(pulse.name, why)

    def _blocked(self, pulse: SignsOfLife, now: float) -> HungProcess | None:
        turned = pulse.beat.turned
        if turned is None or pulse.heard - turned < self._allowed(pulse, now):
            return None
        if any(doing.holds_loop for doing in pulse.beat.doing):
            return None
        why = (
            f"{pulse.name}'s event loop is blocked since {now - turned:.0f} s, by a call that does "
            "not return"
        )
        return HungProcess(pulse.name, why)

    def _idle(self, pulse: SignsOfLife, now: float) -> HungProcess | None:
        for doing in pulse.beat.doing:
            if not doing.computes or now - doing.since < (doing.limit or 0.0):
                continue
            seconds = now - max(doing.since, pulse.computed)
            if seconds >= self._bound(pulse, now) + REST_SECONDS:
                why = f"{pulse.name} {doing.what} and took no processor time for {seconds:.0f} s"
                return HungProcess(pulse.name, why)
        return None

    def _absent(self, pulse: SignsOfLife, now: float) -> HungProcess | None:
        """Judges an engine by the absences that the processes that route to it report. Such a
        process knows nothing newer than the last turn of its loop.
        """
        if pulse.ready is None or self._weights is None:
            return None
        for gateway in self.pulses.values():
            known = now if gateway.beat.turned is None else gateway.beat.turned
            for absence in gateway.beat.absences:
                if absence.engine != pulse.name:
                    continue
                seconds = known - max(absence.since, pulse.ready, self._weights)
                if seconds >= self._bound(pulse, now):
                    why = f"{pulse.name} was in quarantine for {seconds:.0f} s: {absence.error}"
                    return HungProcess(pulse.name, why)
        return None

    def _standing(self, now: float) -> Sequence[HungProcess]:
        """Blames the last part in a chain of parts that wait. It does so if nothing moves, no work
        under way is still within its limit, and no part waits for someone outside.
        """
        stood = now - self._moved
        if stood < self._stall_seconds + self._delay(now) + REST_SECONDS:
            return ()
        waits = self._waits()
        if not waits:
            return ()
        for pulse in self.pulses.values():
            for doing in pulse.beat.doing:
                waits_outside = bool(doing.whom) and doing.whom not in self.pulses
                if doing.excused(now) or waits_outside:
                    return ()
        *_, culprit = self._chain(waits[0])
        why = f"nothing has moved for {duration(stood)}, and the others wait for {culprit}"
        return [HungProcess(culprit, why)]

    # --- Who waits for whom -----------------------------------------------------------------------

    def _waits(self) -> list[str]:
        """The parts that wait for another part."""
        return [name for name in self.pulses if self._waits_for(name)]

    def _waits_for(self, name: str) -> list[str]:
        pulse = self.pulses.get(name)
        if pulse is None:
            return []
        return [doing.whom for doing in pulse.beat.doing if doing.whom]

    def _chain(self, name: str) -> list[str]:
        """Returns a chain from a part that waits to one that waits for no other. If all wait for
        each other, it is the longest chain without a repetition.
        """
        longest = [name]
        chains = [[name]]
        while chains:
            chain = chains.pop(0)
            waits_for = self._waits_for(chain[-1])
            if not waits_for:
                return chain
            longest = max(longest, chain, key=len)
            for whom in waits_for:
                if whom not in chain:
                    chains.append([*chain, whom])
        return longest

    # --- What it says -----------------------------------------------------------------------------

    def standstill(self) -> str:
        """Returns a line that says for how long nothing has moved, and which part waits for
        which.
        """
        stood = f"nothing has moved for {duration(self.stood())}"
        waits = self._waits()
        if not waits:
            return stood
        chain = self._chain(waits[0])
        last = self.pulses.get(chain[-1])
        does = f", which {last.beat.doing[0].what}" if last is not None and last.beat.doing else ""
        words = ", which waits for ".join(chain).replace(", which", "", 1)
        return f"{stood}: {words}{does}"

    def report(self) -> str:
        """Returns the work of every part and the parts that it waits for, with ages."""
        now = self._clock()
        lines: list[str] = []
        for pulse in self.pulses.values():
            lines += _lines(pulse, now)
        for name, ended in self._ended.items():
            lines.append(f"  {name}: ended {now - ended:.0f} s ago, and has not begun again")
        return "\n".join(lines)


def _stopped(pulse: SignsOfLife, now: float) -> HungProcess:
    why = (
        f"{pulse.name} is stopped (SIGSTOP) since {now - pulse.heard:.0f} s, so it has no stacks "
        "to show"
    )
    return HungProcess(pulse.name, why, stopped=True)


def _lines(pulse: SignsOfLife, now: float) -> list[str]:
    beat = pulse.beat
    head = f"  {pulse.name}: last heard of {now - pulse.heard:.0f} s ago"
    if beat.turned is not None and pulse.heard - beat.turned > 2 * LOOK_SECONDS:
        head += f", its loop turned {now - beat.turned:.0f} s ago"
    lines = [head + (f"; {beat.counters}" if beat.counters else "")]
    lines += [f"    {_said(doing, now)}" for doing in beat.doing]
    lines += [
        f"    {absence.engine} is in quarantine since {now - absence.since:.0f} s: {absence.error}"
        for absence in beat.absences
    ]
    return lines


def _said(doing: Doing, now: float) -> str:
    of = f" of {doing.limit:.0f} s" if doing.limit is not None and doing.limit < 1e6 else " s"
    return f"{doing.what}, since {now - doing.since:.0f}{of}"
