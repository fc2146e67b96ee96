"""When things happened in a run, from its timeline: what the newest lines say, and what was appended since the last look."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from midflight.archive.journal import Tail
from midflight.observe.recent import Spans, common_length
from midflight.observe.timeline import TIMELINE, CommitTimed, RolloutTimed, ScoreTimed, StepTimed, Timed, WaitTimed
from midflight.types import Kind

NEWEST_BYTES = 8 * 2**20
"""Of a long timeline: about thirty thousand rollouts, read in a fifth of a second."""

_decode = msgspec.json.Decoder(Timed).decode


@dataclass(slots=True)
class Times:
    """What a timeline said, by kind, in the order of its lines."""

    folder: Path
    rollouts: list[RolloutTimed] = field(default_factory=list[RolloutTimed])
    """Training ones."""
    evaluated: list[RolloutTimed] = field(default_factory=list[RolloutTimed])
    steps: list[StepTimed] = field(default_factory=list[StepTimed])
    commits: list[CommitTimed] = field(default_factory=list[CommitTimed])
    waits: list[WaitTimed] = field(default_factory=list[WaitTimed])
    scores: list[ScoreTimed] = field(default_factory=list[ScoreTimed])
    _tail: Tail | None = None

    def refresh(self) -> bool:
        """Whether anything is new. What a later version of Midflight wrote is passed over."""
        self._tail = self._tail or Tail(self.folder / TIMELINE, newest=NEWEST_BYTES)
        anew, lines = self._tail.new()
        if anew:
            for kept in (self.rollouts, self.evaluated, self.steps, self.commits, self.waits, self.scores):
                kept.clear()
        for line in lines:
            try:
                self._sort(_decode(line))
            except msgspec.DecodeError:
                continue
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


def engine_spans(rollouts: Iterable[RolloutTimed], *, gap: float = 0.0) -> dict[str, Spans]:
    """When each engine worked on some answer: from where it got the request to where the next engine did, or the answer ended.

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


def busy_shares(times: Times) -> tuple[float | None, float | None, float | None]:
    """Of the engines together, of the trainer, and of both at once, in the time from the first step begun to the last ended."""
    if not times.steps:
        return None, None, None
    begin, end = times.steps[0].began, max(step.ended for step in times.steps)
    engines, trainer = Spans(), Spans()
    for spans in engine_spans(times.rollouts).values():
        for started, ended in zip(spans.starts, spans.ends, strict=True):
            engines.add(max(begin, started), min(end, ended))
    for step in times.steps:
        trainer.add(step.began, step.ended)
    if (seconds := end - begin) <= 0:
        return None, None, None
    return engines.length() / seconds, trainer.length() / seconds, common_length(engines, trainer) / seconds


@dataclass(frozen=True, slots=True)
class Split:
    """Where the seconds of rollouts went, as means."""

    generating: float
    """From the first token of each answer to its end."""
    waiting: float
    """From each request to its first token: for a free engine, for one that had stopped, for the prompt to be read."""
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
    return Counter((rollout.source, rollout.failure) for rollout in rollouts if rollout.failure is not None)
