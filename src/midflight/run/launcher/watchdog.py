"""Finds what stands still: a process that is stopped or silent, a loop that is blocked, work that
takes no processor time, an engine that does not come back from quarantine, and a run in which
nothing moves. Synchronous: `Ring` looks every second, and acts.

| found | when |
|---|---|
| condemned | the rollout process asks for the end of a worker |
| stopped | the process is in state T, and its last beat is `stall_seconds` old |
| silent | its last beat is as old; older, where what it did may hold the interpreter |
| blocked | it beats, but its event loop has not turned for as long; not where an agent holds it, which the rollout process judges |
| idle | what it does takes processor time or reads and writes, and did neither for as long |
| absent | an engine is in quarantine for as long, started before that, and a trainer could have brought it weights all the time |
| standing | nothing has moved for as long (a counter of the run, a part that began), and no limit of anything that is done has time left |

To each `stall_seconds` comes the delay of signs of life, as it was measured: of this process, of
half of all parts, or of the part itself. A machine that is too busy to let a part beat in time is
no reason to end it.

Processes are judged here. Agents are judged by the crew of their rollout process, which knows their
deadlines and who blocks whom.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from midflight.delays import Lateness, delay_of
from midflight.observe.motion import BYTES_A_SECOND
from midflight.observe.readable import duration
from midflight.run.heart import BEAT_SECONDS, Beat, Doing
from midflight.run.places.vitals import Vitals, vitals_of
from midflight.sender_clock import SenderClock

LOOK_SECONDS = 1.0
"""Between two looks of the launcher."""
IDLE_SHARE = 0.01
"""Of a core: a process that uses less computes nothing. Its heart takes a thousandth."""
REST_SECONDS = 2.0
"""Later than the other findings: whoever computes nothing may wait for a process that is found to
be stopped in a moment.
"""
MEMORY = 4
"""So many times `stall_seconds` a delay is remembered: longer than the beats of a slow process are
apart.
"""


class Work:
    """When one source last said that a process had done some. `now` is its first `at`."""

    def __init__(self, *, now: float) -> None:
        self.at = now
        self._cpu_seconds = 0.0
        self._num_bytes = 0

    def feel(self, cpu_seconds: float, num_bytes: int, *, now: float) -> None:
        waited = now - self.at
        computes = cpu_seconds - self._cpu_seconds > max(0.03, IDLE_SHARE * waited)
        moves_bytes = num_bytes - self._num_bytes > BYTES_A_SECOND * max(1.0, waited)
        has_ended = cpu_seconds < self._cpu_seconds  # something below it, whose work counted
        if computes or moves_bytes or has_ended:
            self._cpu_seconds = cpu_seconds
            self._num_bytes = num_bytes
            self.at = now


class Pulse:
    """What is known of one process. `now` is CLOCK_MONOTONIC everywhere. Without a `pid` it is
    where only its beats are seen of it.
    """

    def __init__(self, name: str, pid: int | None, *, now: float, memory_seconds: float) -> None:
        self.name = name
        self.pid = pid
        self.began = self.heard = now
        self.ready: float | None = None
        """Since when it serves; none before."""
        self.beat = Beat(None)
        self.lateness = Lateness(BEAT_SECONDS, memory_seconds=memory_seconds)
        """Of its beats, but for those before and after which it may have held the interpreter."""
        self.state = "?"
        self.condemned: str | None = None
        """Why the rollout process asks for its end."""
        self._seen = Work(now=now)
        """The work of the process by what the system says."""
        self._told = Work(now=now)
        """Its work by its own beats, which may count the processes below it."""
        self._clock = SenderClock()

    @property
    def computed(self) -> float:
        """When it last took processor time, or read or wrote."""
        return max(self._seen.at, self._told.at)

    def hear(self, beat: Beat, *, now: float) -> None:
        self.lateness.came(
            now, counts=not any(doing.heavy for doing in (*self.beat.doing, *beat.doing))
        )
        self.beat = beat if beat.at is None else beat.shifted(self._clock.shift(beat.at, now=now))
        self.heard = now
        self._told.feel(beat.cpu_seconds, beat.num_bytes, now=now)

    def feel(self, vitals: Vitals, *, now: float) -> None:
        self.state = vitals.state
        self._seen.feel(vitals.cpu_seconds, vitals.num_bytes, now=now)


@dataclass(frozen=True, slots=True)
class Hung:
    """A process to be ended, and why."""

    name: str
    why: str
    stopped: bool = False
    """It cannot show its stacks."""


class Watchdog:
    """See the module. `pulses` are of the processes that run, by name."""

    def __init__(
        self,
        *,
        stall_seconds: float,
        vitals: Callable[[int], Vitals] = vitals_of,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stall_seconds = stall_seconds
        self._vitals = vitals
        self._clock = clock
        self.pulses: dict[str, Pulse] = {}
        self._ended: dict[str, float] = {}
        """When parts ended that have not begun again."""
        self._looks = Lateness(LOOK_SECONDS, memory_seconds=MEMORY * stall_seconds)
        self._counters: object = None
        self._moved = clock()
        self._report_after = stall_seconds
        self._weights: float | None = clock()
        """Since when somebody hands weights out; none while the trainer is away."""

    # --- What it hears ----------------------------------------------------------------------------

    def begin(self, name: str, pid: int | None) -> None:
        """`pid` is of this machine; None where the process is on another."""
        self.pulses[name] = Pulse(
            name, pid, now=self._clock(), memory_seconds=MEMORY * self._stall_seconds
        )
        self._ended.pop(name, None)
        self._move()

    def end(self, name: str) -> None:
        """The process has ended, or is about to: nothing is found of it any more."""
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
        """The state of a process on another machine, as that says."""
        if (pulse := self.pulses.get(name)) is not None and pulse.pid is None:
            pulse.state = state

    def condemn(self, name: str, why: str) -> None:
        """The rollout process asks for the end of a worker. It does not see what a worker is that
        says nothing; here that is known.
        """
        if (pulse := self.pulses.get(name)) is not None:
            pulse.condemned = why

    def ready(self, name: str) -> None:
        if (pulse := self.pulses.get(name)) is not None:
            pulse.ready = self._clock()

    def weights_lost(self) -> None:
        """The trainer has ended: no engine can be blamed for not coming back."""
        self._weights = None

    def weights_found(self) -> None:
        self._weights = self._clock()

    def progress(self, counters: object) -> None:
        """How far the run is, in any form that can be compared. While it stays equal nothing moves
        but parts that begin, or end what may take long."""
        if counters != self._counters:
            self._counters = counters
            self._move()

    def _move(self) -> None:
        self._moved = self._clock()
        self._report_after = self._stall_seconds

    # --- What it finds ----------------------------------------------------------------------------

    def look(self) -> Sequence[Hung]:
        """Those to be ended now. Not more often than they can be: whoever was found is to be given
        to `end`.
        """
        now = self._clock()
        self._looks.came(now)
        for pulse in self.pulses.values():
            if pulse.pid is not None:
                pulse.feel(self._vitals(pulse.pid), now=now)
        for judge in (self._condemned, self._unheard, self._blocked, self._absent, self._idle):
            if found := [
                hung for pulse in self.pulses.values() if (hung := judge(pulse, now)) is not None
            ]:
                return found
        return self._standing(now)

    def due(self) -> bool:
        """Whether a report is due of a run in which nothing moves though something waits: after
        `stall_seconds`, then at twice the time.
        """
        if not self._waits() or self.stood() < self._report_after:
            return False
        self._report_after = 2 * self.stood()
        return True

    def stood(self) -> float:
        """Seconds since anything moved."""
        return self._clock() - self._moved

    def _delay(self, now: float) -> float:
        """Of all signs of life."""
        return delay_of(self._looks, (pulse.lateness for pulse in self.pulses.values()), now)

    def _bound(self, pulse: Pulse, now: float) -> float:
        """Seconds without a sign of life of that process, after which it hangs."""
        return self._stall_seconds + max(pulse.lateness.worst(now), self._delay(now))

    def _allowed(self, pulse: Pulse, now: float) -> float:
        """Seconds that it may be silent, or its loop blocked: without an end while what may hold
        the interpreter computes or reads.
        """
        heavy = [doing for doing in pulse.beat.doing if doing.heavy]
        bound = self._bound(pulse, now)
        if now - pulse.computed < bound and any(doing.computes for doing in heavy):
            return math.inf
        return max(bound, *(doing.limit or 0.0 for doing in heavy), 0.0)

    def _condemned(self, pulse: Pulse, now: float) -> Hung | None:
        if pulse.condemned is None:
            return None
        return _stopped(pulse, now) if pulse.state == "T" else Hung(pulse.name, pulse.condemned)

    def _unheard(self, pulse: Pulse, now: float) -> Hung | None:
        silent = now - pulse.heard
        stopped = pulse.state == "T"
        if pulse.state == "t" or silent < (self._bound if stopped else self._allowed)(pulse, now):
            return None
        if stopped:
            return _stopped(pulse, now)
        return Hung(
            pulse.name,
            (
                f"{pulse.name} was not heard of for {silent:.0f} s: it holds the interpreter, or "
                "cannot run"
            ),
        )

    def _blocked(self, pulse: Pulse, now: float) -> Hung | None:
        turned = pulse.beat.turned
        if (
            turned is None
            or pulse.heard - turned < self._allowed(pulse, now)
            or any(doing.holds_loop for doing in pulse.beat.doing)
        ):
            return None
        return Hung(
            pulse.name,
            (
                f"{pulse.name}'s event loop is blocked since {now - turned:.0f} s, by a call that "
                "does "
                "not return"
            ),
        )

    def _idle(self, pulse: Pulse, now: float) -> Hung | None:
        for doing in pulse.beat.doing:
            seconds = now - max(doing.since, pulse.computed)
            if (
                doing.computes
                and now - doing.since >= (doing.limit or 0.0)
                and seconds >= self._bound(pulse, now) + REST_SECONDS
            ):
                return Hung(
                    pulse.name,
                    f"{pulse.name} {doing.what} and took no processor time for {seconds:.0f} s",
                )
        return None

    def _absent(self, pulse: Pulse, now: float) -> Hung | None:
        """`pulse` is of an engine, and the absence is known to the process that routes to it: since
        its loop last turned it knows nothing.
        """
        if pulse.ready is None or self._weights is None:
            return None
        for gateway in self.pulses.values():
            known = now if gateway.beat.turned is None else gateway.beat.turned
            for absence in gateway.beat.absences:
                seconds = known - max(absence.since, pulse.ready, self._weights)
                if absence.engine == pulse.name and seconds >= self._bound(pulse, now):
                    return Hung(
                        pulse.name,
                        f"{pulse.name} was in quarantine for {seconds:.0f} s: {absence.error}",
                    )
        return None

    def _standing(self, now: float) -> Sequence[Hung]:
        """Nothing moves, nothing that is done may last longer, and nobody outside is waited for. To
        blame is the last of those who wait.
        """
        every = [doing for pulse in self.pulses.values() for doing in pulse.beat.doing]
        waits = self._waits()
        if (
            now - self._moved < self._stall_seconds + self._delay(now) + REST_SECONDS
            or not waits
            or any(
                doing.excused(now) or (doing.whom and doing.whom not in self.pulses)
                for doing in every
            )
        ):
            return ()
        *_, culprit = self._chain(waits[0])
        return [
            Hung(
                culprit,
                (
                    f"nothing has moved for {duration(now - self._moved)}, and the others wait for "
                    f"{culprit}"
                ),
            )
        ]

    # --- Who waits for whom -----------------------------------------------------------------------

    def _waits(self) -> list[str]:
        """Those who wait for another part."""
        return [name for name in self.pulses if any(True for _ in self._waits_for(name))]

    def _waits_for(self, name: str) -> Iterator[str]:
        pulse = self.pulses.get(name)
        return (
            (doing.whom for doing in pulse.beat.doing if doing.whom)
            if pulse is not None
            else iter(())
        )

    def _chain(self, name: str) -> list[str]:
        """From one who waits to one who waits for nobody; where all wait for each other, as far as
        it goes.
        """
        longest = [name]
        chains = [[name]]
        while chains:
            chain = chains.pop(0)
            further = [whom for whom in self._waits_for(chain[-1]) if whom not in chain]
            if not any(True for _ in self._waits_for(chain[-1])):
                return chain
            longest = max(longest, chain, key=len)
            chains += [[*chain, whom] for whom in further]
        return longest

    # --- What it says -----------------------------------------------------------------------------

    def standstill(self) -> str:
        """For how long nothing has moved, and who waits for whom, in a line."""
        stood = f"nothing has moved for {duration(self.stood())}"
        if not (waits := self._waits()):
            return stood
        chain = self._chain(waits[0])
        last = self.pulses.get(chain[-1])
        does = f", which {last.beat.doing[0].what}" if last is not None and last.beat.doing else ""
        return f"{stood}: {', which waits for '.join(chain).replace(', which', '', 1)}{does}"

    def report(self) -> str:
        """Every part: what it does and whom it waits for, with ages."""
        now = self._clock()
        lines = [line for pulse in self.pulses.values() for line in _lines(pulse, now)]
        lines += [
            f"  {name}: ended {now - ended:.0f} s ago, and has not begun again"
            for name, ended in self._ended.items()
        ]
        return "\n".join(lines)


def _stopped(pulse: Pulse, now: float) -> Hung:
    why = (
        f"{pulse.name} is stopped (SIGSTOP) since {now - pulse.heard:.0f} s, so it has no "
        "stacks "
        "to show"
    )
    return Hung(pulse.name, why, stopped=True)


def _lines(pulse: Pulse, now: float) -> list[str]:
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
