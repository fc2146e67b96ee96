"""The phases of a run, with the side that bounded each stretch of its training, by how much, and
which option to change.

For a finished run as a whole, its summary says this. A stretch is judged by its timeline: the
trainer is busy while it makes a step, an engine while any request is placed on it. A slot of an
engine is busy while an answer grows, from its first token to its end, and not while a request
queues.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from midflight.archive.times import slots_used
from midflight.archive.trace import merged
from midflight.config import derived, load_config
from midflight.config.cores import CoreUse, core_use
from midflight.errors import MidflightError
from midflight.observe import timeline
from midflight.observe.bottleneck import find_bottleneck
from midflight.observe.machine import processors_of
from midflight.observe.readable import busy_words
from midflight.observe.status import Bound
from midflight.types import Kind, TurnTimes

STRETCHES = 3
"""The training is cut into a beginning, a middle and an end, which show a run that changes
sides.
"""
MIN_STEPS = 2
"""A stretch with fewer steps is not judged."""


@dataclass(frozen=True, slots=True)
class RunPhase:
    """A part of a run, in seconds since it began."""

    name: str
    began: float
    ended: float
    steps: int = 0
    engine_busy: float | None = None
    trainer_busy: float | None = None
    slots_used: float | None = None
    bound: Bound = Bound.UNKNOWN
    advice: str = ""
    waits: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by the side that waited and the side that it waited for."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

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


def phases_of(folder: Path, *, seconds: float | None = None) -> list[RunPhase]:
    """The phases of a run. It is empty if the run has no timeline. `seconds` is the time of the
    whole run, including the time before and after its rollout process.
    """
    lines = timeline.read_timeline(folder / timeline.TIMELINE)
    room = room_of(folder)
    rollouts = [line for line in lines if isinstance(line, timeline.RolloutTimed)]
    steps = [line for line in lines if isinstance(line, timeline.StepTimed)]
    steps.sort(key=lambda step: step.ended)
    if not rollouts:
        return []
    begin = min(rollout.began for rollout in rollouts)
    found: list[RunPhase] = []
    training = [rollout.began for rollout in rollouts if rollout.of is Kind.TRAINING]
    first = min(training, default=max(rollout.ended for rollout in rollouts))
    if first > begin:
        found.append(RunPhase("evaluation before", begin, first))
    if steps:
        found += _stretches(lines, steps, first, room)
        scored = [line.at for line in lines if isinstance(line, timeline.ScoreTimed)]
        last = max(scored, default=0.0)
        if last > steps[-1].ended:
            found.append(RunPhase("evaluation after", steps[-1].ended, last))
    counted = found[-1].ended - begin if found else 0.0
    rest = max(begin, (seconds or 0.0) - counted)
    return [RunPhase("start, warm start and end", 0.0, rest), *found]


@dataclass(frozen=True, slots=True)
class RunCapacity:
    """The slots and cores that the run had."""

    slots: int | None = None
    """The number of requests that may decode together: the slots of the engines, or the rollouts
    that may run if these are fewer.
    """
    cores: CoreUse = field(default_factory=CoreUse)


def room_of(folder: Path) -> RunCapacity:
    """Reads the room from the configuration of the run in this folder. If that cannot be read,
    every field of the result is unknown.
    """
    try:
        config = load_config(folder / "config.toml", note=lambda _: None)
    except MidflightError:
        return RunCapacity()
    cores = processors_of(folder)
    slots = min(derived.engine_slots(config), derived.in_flight(config))
    return RunCapacity(slots, CoreUse() if cores is None else core_use(config, cores))


def _stretches(
    lines: Sequence[timeline.Timed],
    steps: Sequence[timeline.StepTimed],
    began: float,
    room: RunCapacity,
) -> Iterator[RunPhase]:
    """Judges the training as a whole, and its stretches if there are enough steps."""
    yield _judged("training", lines, steps, began, room)
    each = len(steps) // STRETCHES
    if each < MIN_STEPS:
        return
    edges = [each * number for number in range(STRETCHES)]
    edges.append(len(steps))
    for first, behind in itertools.pairwise(edges):
        since = began if first == 0 else steps[first - 1].ended
        name = f"steps {steps[first].version} to {steps[behind - 1].version}"
        yield _judged(name, lines, steps[first:behind], since, room)


def _judged(
    name: str,
    lines: Sequence[timeline.Timed],
    steps: Sequence[timeline.StepTimed],
    began: float,
    room: RunCapacity,
) -> RunPhase:
    ended = steps[-1].ended
    turns: list[TurnTimes] = []
    for line in lines:
        if isinstance(line, timeline.RolloutTimed):
            turns += [turn for turn in line.turns if turn.placed]
    engine = _share(((turn.placed[0][1], turn.ended) for turn in turns), began, ended)
    trainer = _share(((step.began, step.ended) for step in steps), began, ended)
    waits = defaultdict[str, float](float)
    for line in lines:
        if isinstance(line, timeline.WaitTimed):
            seconds = max(0.0, min(line.ended, ended) - max(line.began, began))
            waits[f"{line.who} for {line.for_whom}"] += seconds
    used = slots_used(turns, began, ended, slots=room.slots)
    bound, advice = find_bottleneck(
        engine_busy=engine, trainer_busy=trainer, slots_used=used, cores=room.cores
    )
    longest = sorted((item for item in waits.items() if item[1] > 0), key=lambda item: -item[1])
    return RunPhase(
        name, began, ended, len(steps), engine, trainer, used, bound, advice, dict(longest)
    )


def _share(spans: Iterable[tuple[float, float]], began: float, ended: float) -> float | None:
    """The share of the time between `began` and `ended` that some span covers."""
    if ended <= began:
        return None
    covered = 0.0
    for since, until in merged(spans):
        covered += max(0.0, min(until, ended) - max(since, began))
    return min(1.0, covered / (ended - began))
