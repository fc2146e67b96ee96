"""Divides a run into phases. For each stretch of the training it says which side bounded it, by how
much, and who waited for whom. The figures are differences between the lines of the journal.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from midflight.observe.bottleneck import find_bottleneck
from midflight.observe.history import JournalHistory
from midflight.observe.lines import StepLine
from midflight.observe.readable import busy_words
from midflight.observe.status import Bound
from midflight.observe.summary import Summary

STRETCHES = 3
"""The training is cut into a beginning, a middle and an end, which show a run that changes
sides.
"""
MIN_STEPS = 2
"""A stretch with fewer steps is not judged."""


@dataclass(frozen=True, slots=True)
class RunPhase:
    """A part of a run."""

    name: str
    seconds: float
    steps: int = 0
    engine_busy: float | None = None
    trainer_busy: float | None = None
    slots_used: float | None = None
    bound: Bound = Bound.UNKNOWN
    waits: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by the side that waited and the side that it waited for."""

    @property
    def verdict(self) -> str:
        """The side that bounded the phase, in words, or an empty string if nothing is judged."""
        if self.bound is Bound.UNKNOWN:
            return ""
        busy = busy_words(
            engine_busy=self.engine_busy,
            trainer_busy=self.trainer_busy,
            slots_used=self.slots_used,
        )
        return f"{self.bound}: {busy}"


def phases_of(past: JournalHistory, summary: Summary) -> list[RunPhase]:
    """The phases of the last start of a run, whose journal and summary are given. It is empty if
    the run has not trained.
    """
    steps = past.newest_start
    if not steps or not summary.training_seconds:
        return []
    rest = RunPhase(
        "start, warm start, evaluations and end", summary.seconds - summary.training_seconds
    )
    training = RunPhase(
        "training",
        summary.training_seconds,
        len(steps),
        summary.engine_busy,
        summary.trainer_busy,
        summary.slots_used,
        summary.bound,
        summary.waits,
    )
    return [rest, training, *_stretches(steps)]


def _stretches(steps: Sequence[StepLine]) -> Iterator[RunPhase]:
    """Judges the stretches of the training if there are enough steps."""
    each = len(steps) // STRETCHES
    if each < MIN_STEPS:
        return
    edges = [each * number for number in range(STRETCHES)]
    edges.append(len(steps))
    for first, behind in pairwise(edges):
        before = steps[first - 1] if first else None
        yield _stretch(before, steps[first:behind])


def _stretch(before: StepLine | None, steps: Sequence[StepLine]) -> RunPhase:
    """The stretch of these steps, which begins with the end of the step `before` them, or with the
    training phase.
    """
    last = steps[-1]
    seconds = last.training_seconds
    if before is not None:
        seconds -= before.training_seconds

    def share(name: str) -> float | None:
        """The share of the stretch, from the shares of the phase up to its two ends."""
        value: float | None = getattr(last, name)
        if value is None or seconds <= 0:
            return None
        busy = value * last.training_seconds
        if before is not None:
            busy -= (getattr(before, name) or 0.0) * before.training_seconds
        return min(1.0, max(0.0, busy / seconds))

    waits = defaultdict[str, float](float)
    for line in steps:
        for who, waited in (line.waits or {}).items():
            waits[who] += waited
    engine_busy = share("engine_busy")
    trainer_busy = share("trainer_busy")
    slots_used = share("slots_used")
    bound, _ = find_bottleneck(
        engine_busy=engine_busy, trainer_busy=trainer_busy, slots_used=slots_used
    )
    return RunPhase(
        f"steps {steps[0].step} to {last.step}",
        seconds,
        len(steps),
        engine_busy,
        trainer_busy,
        slots_used,
        bound,
        dict(sorted(waits.items(), key=lambda item: -item[1])),
    )
