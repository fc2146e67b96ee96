"""The times of events in a run: the lines of its timeline, and the times that are computed from
them.
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
from midflight.observe.rolling import Spans
from midflight.observe.timeline import (
    TIMELINE,
    CommitTimed,
    RolloutTimed,
    ScoreTimed,
    StepTimed,
    Timed,
    WaitTimed,
)
from midflight.types import Kind, Version

NEWEST_BYTES = 4 * 2**20
"""The number of bytes that are read of a long timeline, and of each earlier part of it: about ten
thousand rollouts, in a tenth of a second.
"""

NEAR_BYTES = 4096
"""The number of bytes to within which a place in a timeline is known before it is searched line by
line.
"""

_decode = msgspec.json.Decoder(Timed).decode


@contextmanager
def _uncollected() -> Generator[None]:
    """Turns the garbage collector off for a while. It would take more time than the reading, and
    the objects that are read have no cycles.
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
    """The lines of a timeline by kind, in their order. They are the newest ones, or a part that
    does not change.
    """

    folder: Path
    part: "TimelinePart | None" = None
    newest: int = NEWEST_BYTES
    """The number of bytes of a longer timeline that are read at first, if no part is asked for."""
    rollouts: list[RolloutTimed] = field(default_factory=list[RolloutTimed])
    """Rollouts of training tasks."""
    evaluated: list[RolloutTimed] = field(default_factory=list[RolloutTimed])
    steps: list[StepTimed] = field(default_factory=list[StepTimed])
    commits: list[CommitTimed] = field(default_factory=list[CommitTimed])
    waits: list[WaitTimed] = field(default_factory=list[WaitTimed])
    scores: list[ScoreTimed] = field(default_factory=list[ScoreTimed])
    _tail: Tail | None = None
    _was_read: bool = False

    def refresh(self) -> bool:
        """Reads the new lines, and returns whether there were any. Lines of a later version of
        Midflight are skipped.
        """
        if self.part is None:
            self._tail = self._tail or Tail(self.folder / TIMELINE, newest=self.newest)
            anew, lines = self._tail.new()
        else:
            anew = False
            lines = [] if self._was_read else self.part.lines(self.folder)
            self._was_read = True
        if anew:
            self._clear()
        with _uncollected():
            for line in lines:
                with suppress(msgspec.DecodeError):
                    self._sort(_decode(line))
        return anew or bool(lines)

    def _clear(self) -> None:
        self.rollouts.clear()
        self.evaluated.clear()
        self.steps.clear()
        self.commits.clear()
        self.waits.clear()
        self.scores.clear()

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
    """Some whole lines of a timeline, as its bytes [begin, end)."""

    begin: int
    end: int
    earlier: float | None
    """The beginning of the part before it, in seconds of the run, or None if there is none."""
    later: float | None
    """The beginning of the part after it, in seconds of the run, or None if there is none."""

    def lines(self, folder: Path) -> list[bytes]:
        with (folder / TIMELINE).open("rb") as file:
            file.seek(self.begin)
            return file.read(self.end - self.begin).splitlines()


def part_from(folder: Path, seconds: float) -> TimelinePart | None:
    """The part that begins with the first line written at that time or later, or None if the newest
    part has all of it. Lines are in the order of their times, except for instants.
    """
    try:
        with (folder / TIMELINE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = _place(file, seconds, size)
            end = _line_at(file, begin + NEWEST_BYTES)
            if end >= size:
                return None
            earlier = None
            if begin:
                earlier = _seconds_at(file, _line_at(file, begin - NEWEST_BYTES))
            return TimelinePart(begin, end, earlier, _seconds_at(file, end))
    except FileNotFoundError:
        return None


def before_newest(folder: Path) -> float | None:
    """The beginning of the part before the newest, in seconds of the run, or None if there is no
    earlier part.
    """
    try:
        with (folder / TIMELINE).open("rb") as file:
            newest = file.seek(0, os.SEEK_END) - NEWEST_BYTES
            if newest <= 0:
                return None
            return _seconds_at(file, _line_at(file, newest - NEWEST_BYTES))
    except FileNotFoundError:
        return None


def _place(file: BinaryIO, seconds: float, size: int) -> int:
    """The offset of the first line that was written then or later. It is found by halving, and at
    last line by line.
    """
    # Lines before `low` were written earlier, lines from `high` on were not.
    low = 0
    high = size
    while high - low > NEAR_BYTES:
        middle = _line_at(file, (low + high) // 2)
        if middle >= high:
            break
        if _seconds_at(file, middle) < seconds:
            low = middle
        else:
            high = middle
    file.seek(low)
    for line in file:
        if _seconds(line) >= seconds:
            break
        low += len(line)
    return low


def _line_at(file: BinaryIO, offset: int) -> int:
    """The offset of the first line that begins at `offset` or later."""
    if offset <= 0:
        return 0
    file.seek(offset - 1)
    return offset - 1 + len(file.readline())


def _seconds_at(file: BinaryIO, offset: int) -> float:
    """Returns the time at which the first readable line from `offset` on was written. It is
    infinite behind the last line.
    """
    file.seek(offset)
    for line in file:
        seconds = _seconds(line)
        if seconds > -math.inf:
            return seconds
    return math.inf


def _seconds(line: bytes) -> float:
    """Returns the time at which a line was written. A line that cannot be read, for instance
    because a crash cut it short, counts as early.
    """
    try:
        read = _decode(line)
    except msgspec.DecodeError:
        return -math.inf
    if isinstance(read, RolloutTimed | StepTimed | WaitTimed):
        return read.ended
    return read.at


def engine_spans(rollouts: Iterable[RolloutTimed], *, gap: float = 0.0) -> dict[str, Spans]:
    """Returns the times in which each engine worked on some answer: from getting the request until
    the next engine got it or the answer ended.

    Pauses shorter than `gap` seconds are closed.
    """
    found: defaultdict[str, Spans] = defaultdict(Spans)
    for rollout in rollouts:
        for turn in rollout.turns:
            ends = [at for _, at in turn.placed[1:]]
            ends.append(turn.ended)
            for (engine, began), ended in zip(turn.placed, ends, strict=True):
                found[engine].add(began, ended + gap)
    for spans in found.values():
        spans.ends[:] = [end - gap for end in spans.ends]
    return dict(sorted(found.items()))


def handover_seconds(commits: Iterable[CommitTimed]) -> dict[Version, tuple[float, float]]:
    """Returns the seconds that it took to bring each version to the engines, and the seconds that
    they stood still for it. Both are those of the slowest engine, as in the journal.
    """
    found: dict[Version, tuple[float, float]] = {}
    for commit in commits:
        stage, pause = found.get(commit.version, (0.0, 0.0))
        longest = max(stage, commit.stage_seconds), max(pause, commit.pause_seconds)
        found[commit.version] = longest
    return found


@dataclass(frozen=True, slots=True)
class RolloutTimeSplit:
    """The mean seconds that a rollout spent on each kind of work or wait."""

    generating: float
    """The time from the first token of each answer to its end."""
    waiting: float
    """The time from each request to its first token: waiting for a free engine, for an engine that
    had stopped, or for the prompt to be read.
    """
    environment: float
    """The rest: the agent itself, its tools, its reward."""


def split(rollouts: Sequence[RolloutTimed]) -> RolloutTimeSplit | None:
    """The split of these rollouts, or None if it is not known when answers were given."""
    known = [rollout for rollout in rollouts if rollout.turns]
    if not known:
        return None
    generating = 0.0
    waiting = 0.0
    rest = 0.0
    for rollout in known:
        inside = 0.0
        for turn in rollout.turns:
            first = turn.sampled[0][1] if turn.sampled else turn.ended
            generating += turn.ended - first
            waiting += first - turn.began
            inside += turn.ended - turn.began
        rest += max(0.0, rollout.ended - rollout.began - inside)
    return RolloutTimeSplit(generating / len(known), waiting / len(known), rest / len(known))


def failures(rollouts: Iterable[RolloutTimed]) -> Counter[tuple[str, str]]:
    """Tries without a reward by source and class of the error."""
    return Counter(
        (rollout.source, rollout.failure) for rollout in rollouts if rollout.failure is not None
    )
