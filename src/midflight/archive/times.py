"""When things happened in a run, from its timeline: what the newest lines say, and what was
appended since the last look.
"""

import gc
import math
import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from midflight.archive.journal import Tail
from midflight.observe.recent import Spans, common_length
from midflight.observe.timeline import (
    TIMELINE,
    BatchTimed,
    Began,
    CommitTimed,
    DropTimed,
    EngineTimed,
    RolloutTimed,
    ScoreTimed,
    StepTimed,
    Timed,
    WaitTimed,
)
from midflight.types import Kind, TurnTimes

NEWEST_BYTES = 4 * 2**20
"""Of a long timeline, and of each earlier part of it: about ten thousand rollouts, read in a tenth
of a second.
"""

NEAR_BYTES = 4096
"""Of a place in a timeline: from here on line by line."""

_decode = msgspec.json.Decoder(Timed).decode


@contextmanager
def _uncollected() -> Generator[None]:
    """Without searches for garbage, which would take more time than the reading: what is read has
    no cycles.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(slots=True)
class Times:
    """What a timeline said, by kind, in the order of its lines: the newest, or a part that does not
    change.
    """

    folder: Path
    part: "TimelinePart | None" = None
    newest: int = NEWEST_BYTES
    """Bytes of a longer one that are read at first, where no part is asked for."""
    rollouts: list[RolloutTimed] = field(default_factory=list[RolloutTimed])
    """Training ones."""
    evaluated: list[RolloutTimed] = field(default_factory=list[RolloutTimed])
    steps: list[StepTimed] = field(default_factory=list[StepTimed])
    commits: list[CommitTimed] = field(default_factory=list[CommitTimed])
    waits: list[WaitTimed] = field(default_factory=list[WaitTimed])
    scores: list[ScoreTimed] = field(default_factory=list[ScoreTimed])
    _tail: Tail | None = None
    _was_read: bool = False

    def refresh(self) -> bool:
        """Whether anything is new. What a later version of Midflight wrote is passed over."""
        if self.part is None:
            self._tail = self._tail or Tail(self.folder / TIMELINE, newest=self.newest)
            anew, lines = self._tail.new()
        else:
            anew = False
            lines = [] if self._was_read else self.part.lines(self.folder)
            self._was_read = True
        if anew:
            for kept in (
                self.rollouts,
                self.evaluated,
                self.steps,
                self.commits,
                self.waits,
                self.scores,
            ):
                kept.clear()
        with _uncollected():
            for line in lines:
                with suppress(msgspec.DecodeError):
                    self._sort(_decode(line))
        return anew or bool(lines)

    def _sort(self, line: Timed) -> None:
        match line:
            case RolloutTimed(of=Kind.TRAINING):
                self.rollouts.append(line)
            case RolloutTimed():
                self.evaluated.append(line)
            case StepTimed():
                self.steps.append(line)
            case CommitTimed():
                self.commits.append(line)
            case WaitTimed():
                self.waits.append(line)
            case ScoreTimed():
                self.scores.append(line)
            case _:
                pass


@dataclass(frozen=True, slots=True)
class TimelinePart:
    """Some of a timeline's bytes, whole lines; and in seconds of the run where the parts before and
    after it begin, none where there is none.
    """

    begin: int
    end: int
    earlier: float | None
    later: float | None

    def lines(self, folder: Path) -> list[bytes]:
        with (folder / TIMELINE).open("rb") as file:
            file.seek(self.begin)
            return file.read(self.end - self.begin).splitlines()


def part_from(folder: Path, seconds: float) -> TimelinePart | None:
    """From what was written at that time on; None where the newest part has all of it. Lines are in
    the order of their times, but for instants.
    """
    try:
        with (folder / TIMELINE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = _place(file, seconds, size)
            end = _line_at(file, begin + NEWEST_BYTES)
            if end >= size:
                return None
            earlier = _seconds_at(file, _line_at(file, begin - NEWEST_BYTES)) if begin else None
            return TimelinePart(begin, end, earlier, _seconds_at(file, end))
    except FileNotFoundError:
        return None


def before_newest(folder: Path) -> float | None:
    """Where the part before the newest begins, in seconds of the run; None where the newest is all
    there is.
    """
    try:
        with (folder / TIMELINE).open("rb") as file:
            over = file.seek(0, os.SEEK_END) - NEWEST_BYTES
            return _seconds_at(file, _line_at(file, over - NEWEST_BYTES)) if over > 0 else None
    except FileNotFoundError:
        return None


def _place(file: BinaryIO, seconds: float, size: int) -> int:
    """Of the first line that was written then or later: by halving, and at last line by line."""
    # what lies before `low` was written earlier, what lies from `high` on was not
    low = 0
    high = size
    while high - low > NEAR_BYTES and (middle := _line_at(file, (low + high) // 2)) < high:
        if _seconds_at(file, middle) < seconds:
            low = middle
        else:
            high = middle
    file.seek(low)
    while (line := file.readline()) and _seconds(line) < seconds:
        low += len(line)
    return low


def _line_at(file: BinaryIO, offset: int) -> int:
    """Where the first line begins that begins there or later."""
    if offset <= 0:
        return 0
    file.seek(offset - 1)
    return offset - 1 + len(file.readline())


def _seconds_at(file: BinaryIO, offset: int) -> float:
    """Of the first line from there on that can be read; infinite behind the last."""
    file.seek(offset)
    return next((found for line in file if (found := _seconds(line)) > -math.inf), math.inf)


def _seconds(line: bytes) -> float:
    """When it was written. One that cannot be read, as one that a crash cut short, counts as
    early.
    """
    try:
        read = _decode(line)
    except msgspec.DecodeError:
        return -math.inf
    return (
        read.at
        if isinstance(read, Began | BatchTimed | CommitTimed | ScoreTimed | DropTimed | EngineTimed)
        else read.ended
    )


def engine_spans(rollouts: Iterable[RolloutTimed], *, gap: float = 0.0) -> dict[str, Spans]:
    """When each engine worked on some answer: from where it got the request to where the next
    engine did, or the answer ended.

    Pauses shorter than `gap` seconds are closed.
    """
    found: defaultdict[str, Spans] = defaultdict(Spans)
    for rollout in rollouts:
        for turn in rollout.turns:
            ends = [*(at for _, at in turn.placed[1:]), turn.ended]
            for (engine, began), ended in zip(turn.placed, ends, strict=True):
                found[engine].add(began, ended + gap)
    for spans in found.values():
        spans.ends[:] = [end - gap for end in spans.ends]
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the time from the first step begun to the last ended; none where that is no time."""

    engines: float | None = None
    """In which some engine had a request."""
    trainer: float | None = None
    both: float | None = None
    slots: float | None = None
    """Of the requests that could have decoded together, those that did."""


def busy_shares(times: Times, *, slots: int | None = None) -> Shares:
    """`slots`: requests that may decode together, in all engines."""
    begin, end = (
        (times.steps[0].began, max(step.ended for step in times.steps))
        if times.steps
        else (0.0, 0.0)
    )
    if (seconds := end - begin) <= 0:
        return Shares()
    engines = Spans()
    trainer = Spans()
    for spans in engine_spans(times.rollouts).values():
        for started, ended in zip(spans.starts, spans.ends, strict=True):
            engines.add(max(begin, started), min(end, ended))
    for step in times.steps:
        trainer.add(step.began, step.ended)
    both = common_length(engines, trainer) / seconds
    turns = (turn for rollout in (*times.rollouts, *times.evaluated) for turn in rollout.turns)
    return Shares(
        engines.length() / seconds,
        trainer.length() / seconds,
        both,
        slots_used(turns, begin, end, slots=slots),
    )


def slots_used(
    turns: Iterable[TurnTimes], began: float, ended: float, *, slots: int | None
) -> float | None:
    """Of the slots in the time between, the share in which an answer grew."""
    if not slots or ended <= began:
        return None
    grew = sum(
        max(0.0, min(turn.ended, ended) - max(turn.sampled[0][1], began))
        for turn in turns
        if turn.sampled
    )
    return min(1.0, grew / (slots * (ended - began)))


@dataclass(frozen=True, slots=True)
class Split:
    """Where the seconds of rollouts went, as means."""

    generating: float
    """From the first token of each answer to its end."""
    waiting: float
    """From each request to its first token: for a free engine, for one that had stopped, for the
    prompt to be read.
    """
    environment: float
    """The rest: the agent itself, its tools, its reward."""


def split(rollouts: Sequence[RolloutTimed]) -> Split | None:
    """None where nothing is known of when answers were given."""
    known = [rollout for rollout in rollouts if rollout.turns]
    if not known:
        return None
    generating = waiting = rest = 0.0
    for rollout in known:
        inside = 0.0
        for turn in rollout.turns:
            first = turn.sampled[0][1] if turn.sampled else turn.ended
            generating += turn.ended - first
            waiting += first - turn.began
            inside += turn.ended - turn.began
        rest += max(0.0, rollout.ended - rollout.began - inside)
    return Split(generating / len(known), waiting / len(known), rest / len(known))


def failures(rollouts: Iterable[RolloutTimed]) -> Counter[tuple[str, str]]:
    """Tries without a reward by source and class of the error."""
    return Counter(
        (rollout.source, rollout.failure) for rollout in rollouts if rollout.failure is not None
    )
