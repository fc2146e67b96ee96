"""`metrics.jsonl`: one line per step, evaluation and alarm, each complete as soon as it is written.

A key that has no value is left out, so that it is never read as zero; a number that isn't finite is
null.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from midflight.errors import ConfigError
from midflight.observe.failures import Failures
from midflight.observe.learning import LEARNED_FROM, Histogram, Learning
from midflight.observe.progress import RunState
from midflight.observe.status import Totals, is_incomplete
from midflight.observe.timeline import TIMED, TIMELINE, Timeline
from midflight.types import Kind, Version, facts


class StepLine(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step", tag_field="kind"
):
    """One step of the trainer. docs/metrics.md defines every key."""

    step: int
    version: Version
    seconds: float
    step_seconds: float
    tokens: int
    groups: int | None = None
    rollouts: int
    reward: float | None = None
    reward_by_source: dict[str, float] | None = None
    reward_spread: float | None = None
    zero_spread_share: float | None = None
    generated_length: float | None = None
    trained_length: float | None = None
    truncated_share: float | None = None
    lengths: dict[str, float] | None = None
    histograms: dict[str, Histogram] | None = None
    turns_mean: float | None = None
    components: dict[str, float] | None = None
    metrics: dict[str, float] | None = None
    curriculum: dict[str, float] | None = None
    failures: dict[str, int] | None = None
    staleness: dict[int, int] | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    generation_rate: float
    training_rate: float
    overlap_share: float | None = None
    waits: dict[str, float] | None = None
    dropped: dict[str, int] | None = None
    stage_seconds: float | None = None
    pause_seconds: float | None = None
    trainer: dict[str, float | None] | None = None
    totals: Totals


class EvaluationLine(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """One source in one evaluation on held-out tasks."""

    version: Version
    step: int
    seconds: float
    source: str
    num_tasks: int
    mean_reward: float | None
    num_failed: int = 0
    error: str | None = None
    """Of one of those that failed."""
    incomplete: bool = False
    """Too many failed to compare the mean with another."""
    at: dict[str, float] | None = None
    """Of a suite: its `samples` and `temperature`, `pass@k` and `best@k`."""


class AlarmLine(msgspec.Struct, frozen=True, kw_only=True, tag="alarm", tag_field="kind"):
    """What the terminal said that somebody should look at."""

    version: Version
    step: int
    seconds: float
    name: str
    text: str


class CompletionsLine(
    msgspec.Struct, frozen=True, kw_only=True, tag="completions", tag_field="kind"
):
    """Some rollouts that the step was made on."""

    version: Version
    step: int
    seconds: float
    rollouts: tuple[facts.Shown, ...]


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint", tag_field="kind"):
    """A checkpoint of `version` is on disk."""

    version: Version
    step: int
    seconds: float


class MemberLine(msgspec.Struct, frozen=True, kw_only=True, tag="engine", tag_field="kind"):
    """An engine came or went while the run went on."""

    version: Version
    step: int
    seconds: float
    engine: str
    event: str
    """`joined` or `left`."""
    detail: str
    """Where it came from, or why it went."""


class ResumeLine(msgspec.Struct, frozen=True, kw_only=True, tag="resume", tag_field="kind"):
    """The run went on from the checkpoint of `version`. Lines of later steps are gone; what
    happened all the same is in the totals.
    """

    version: Version
    step: int
    seconds: float
    totals: Totals


Line = (
    StepLine
    | EvaluationLine
    | AlarmLine
    | CompletionsLine
    | CheckpointLine
    | MemberLine
    | ResumeLine
)

SURVIVING = ("trained_tokens", "max_token_staleness")
"""The totals that are of steps, and go with those that a resumed run has lost."""

_encode = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode


@dataclass(frozen=True, slots=True)
class PastLines:
    """What a journal holds, in order."""

    steps: tuple[StepLine, ...] = ()
    evaluations: tuple[EvaluationLine, ...] = ()
    alarms: tuple[AlarmLine, ...] = ()
    completions: tuple[CompletionsLine, ...] = ()
    checkpoints: tuple[CheckpointLine, ...] = ()
    members: tuple[MemberLine, ...] = ()
    resumes: tuple[ResumeLine, ...] = ()

    @property
    def trained_ages(self) -> dict[int, int]:
        """Trained tokens by their age in versions."""
        found = Counter[int]()
        for line in self.steps:
            found.update(line.staleness or {})
        return dict(found)

    @classmethod
    def of(cls, lines: Iterable[Line]) -> PastLines:
        kept = tuple(lines)
        return cls(
            tuple(x for x in kept if isinstance(x, StepLine)),
            tuple(x for x in kept if isinstance(x, EvaluationLine)),
            tuple(x for x in kept if isinstance(x, AlarmLine)),
            tuple(x for x in kept if isinstance(x, CompletionsLine)),
            tuple(x for x in kept if isinstance(x, CheckpointLine)),
            tuple(x for x in kept if isinstance(x, MemberLine)),
            tuple(x for x in kept if isinstance(x, ResumeLine)),
        )

    @property
    def seconds(self) -> float:
        """That the run had run for at its last line."""
        return max(
            (line.seconds for line in (*self.steps, *self.evaluations, *self.resumes)), default=0.0
        )

    def restore(self, state: RunState, everything: PastLines) -> None:
        """Lets the state go on from here, the lines that survive: steps, and evaluations made.
        `everything` has the lost ones too.
        """
        last = self.steps[-1] if self.steps else None
        counted = [line.totals for line in (*everything.steps, *everything.resumes)] or [Totals()]
        most = {name: max(getattr(totals, name) for totals in counted) for name in asdict(Totals())}
        survived = asdict(Totals() if last is None else last.totals)
        totals = Totals(**{**most, **{name: survived[name] for name in SURVIVING}})
        step, version = (0, 0) if last is None else (last.step, last.version)
        state.restore(step=step, version=version, totals=totals, seconds=everything.seconds)
        for line in self.evaluations:
            state.apply(
                facts.Evaluated(
                    line.version,
                    line.source,
                    line.num_tasks,
                    line.mean_reward,
                    line.num_failed,
                    line.error,
                    line.at,
                )
            )


def read_journal(path: Path, *, until: Version | None = None) -> PastLines:
    """The lines of a journal, up to a version. A last line that a crash cut short is left out; a
    missing file is empty.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    found = [
        _decoded(path, number, line)
        for number, line in enumerate(lines[:-1], start=1)
        if line.strip()
    ]
    return PastLines.of(line for line in found if until is None or line.version <= until)


def newest_version(path: Path, *, otherwise: Version) -> Version:
    return max((line.version for line in read_journal(path).steps), default=otherwise)


def _decoded(path: Path, number: int, line: bytes) -> Line:
    try:
        return decode_line(line)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path}:{number}: not a line of this journal ({error}); move the file away or start "
            "without --resume"
        ) from None


class Journal:
    """Writes the journal as facts come in. It applies each after `state`, whose counts it
    writes.
    """

    def __init__(self, path: Path, state: RunState, *, resume_at: Version | None = None) -> None:
        """Starts the file anew, or with `resume_at` keeps its lines up to that version, and `state`
        goes on from them.

        Later lines are of steps that did not survive.
        """
        self._state = state
        self._path = path
        history = PastLines()
        if resume_at is not None:
            history = read_journal(path, until=resume_at)
            history.restore(state, read_journal(path))
            history = self._resumed(history, resume_at)
        self._begin(history)
        self._timeline = Timeline(path.with_name(TIMELINE), state, goes_on=resume_at is not None)

    def _resumed(self, history: PastLines, at: Version) -> PastLines:
        resumed = ResumeLine(
            version=at,
            step=self._state.step,
            seconds=self._state.seconds,
            totals=self._state.totals,
        )
        return replace(history, resumes=(*history.resumes, resumed))

    def _begin(self, history: PastLines) -> None:
        self._steps = {line.version for line in history.steps}
        self._evaluations = {(line.version, line.source) for line in history.evaluations}
        self._groups: dict[Version, tuple[int, dict[int, int], Learning]] = {}
        _rewrite(self._path, history)
        self._file = self._path.open("ab")
        self._forget()

    def _go_back(self, checkpoint: Version) -> None:
        """The trainer goes on from there while this process lives."""
        self._file.close()
        self._begin(self._resumed(read_journal(self._path, until=checkpoint), checkpoint))

    def close(self) -> None:
        self._file.close()
        self._timeline.close()

    def apply(self, fact: facts.Fact) -> None:
        if isinstance(fact, LEARNED_FROM):
            self._learning.apply(fact)
        if isinstance(fact, TIMED):
            self._timeline.apply(fact)
        match fact:
            case facts.RolloutEnded() if fact.key.kind is Kind.TRAINING:
                self._rollouts += 1
                if fact.reward is None:
                    self._failures.add(fact.error)
                else:
                    self._rewards[fact.source].append(fact.reward)
            case facts.GroupClosed(reason=reason):
                self._dropped[reason.value] += 1
            case facts.Waited():
                self._waits[f"{fact.who} for {fact.for_whom}"] += fact.seconds
            case facts.Leased():
                self._leased(fact)
            case facts.WeightsCommitted():
                self._stage = max(self._stage or 0.0, fact.stage_seconds)
                self._pause = max(self._pause or 0.0, fact.pause_seconds)
            case facts.Stepped(version=version) if version not in self._steps:
                self._steps.add(version)
                self._write(self._step_line(fact))
                self._forget()
            case facts.Evaluated(version=version, source=source) if (
                version,
                source,
            ) not in self._evaluations:
                self._evaluations.add((version, source))
                self._write(self._evaluation_line(fact))
            case facts.CompletionsShown(version=version, rollouts=shown):
                self._write(
                    CompletionsLine(
                        version=version,
                        step=self._state.step,
                        seconds=self._state.seconds,
                        rollouts=shown,
                    )
                )
            case facts.Checkpointed(version=version):
                self._write(
                    CheckpointLine(
                        version=version, step=self._state.step, seconds=self._state.seconds
                    )
                )
            case facts.EngineJoined() | facts.EngineLeft():
                self._write(self._member_line(fact))
            case facts.WentBack(checkpoint=checkpoint):
                self._go_back(checkpoint)
            case facts.Alarmed(name=name, text=text):
                status = self._state.status()
                self._write(
                    AlarmLine(
                        version=status.version,
                        step=status.step,
                        seconds=status.seconds,
                        name=name,
                        text=text,
                    )
                )
            case _:
                pass

    def _leased(self, fact: facts.Leased) -> None:
        """Taken before the step before it ends, where batches are prefetched: kept under the
        version it will train at.
        """
        train_version = fact.batch.train_version
        self._groups = {
            version: taken
            for version, taken in self._groups.items()
            if version >= train_version - 2
        }
        taken = Learning()
        taken.apply(fact)
        self._groups[train_version] = (
            len(fact.batch.groups),
            dict(sorted(fact.staleness.items())),
            taken,
        )

    def _member_line(self, fact: facts.EngineJoined | facts.EngineLeft) -> MemberLine:
        event, detail = (
            ("joined", fact.url) if isinstance(fact, facts.EngineJoined) else ("left", fact.why)
        )
        status = self._state.status()
        return MemberLine(
            version=status.version,
            step=status.step,
            seconds=status.seconds,
            engine=fact.engine,
            event=event,
            detail=detail,
        )

    def _evaluation_line(self, score: facts.Evaluated) -> EvaluationLine:
        incomplete = is_incomplete(score.num_tasks, score.num_failed)
        return EvaluationLine(
            step=self._state.step,
            seconds=self._state.seconds,
            incomplete=incomplete,
            **msgspec.structs.asdict(score),
        )

    def _step_line(self, step: facts.Stepped) -> StepLine:
        status = self._state.status()
        groups, ages, taken = self._groups.pop(step.version - 1, (None, None, Learning()))
        learning = self._learning.status()
        rewards = [reward for of_source in self._rewards.values() for reward in of_source]
        return StepLine(
            step=status.step,
            version=step.version,
            seconds=status.seconds,
            step_seconds=step.ended - step.started,
            tokens=step.num_tokens,
            groups=groups,
            rollouts=self._rollouts,
            reward=sum(rewards) / len(rewards) if rewards else None,
            reward_by_source={name: sum(r) / len(r) for name, r in self._rewards.items()} or None,
            reward_spread=learning.reward_spread,
            zero_spread_share=learning.zero_spread_share,
            generated_length=learning.generated_length,
            trained_length=taken.status().trained_length,
            truncated_share=learning.truncated_share,
            lengths=learning.lengths or None,
            histograms=self._histograms(taken) or None,
            turns_mean=learning.turns_mean,
            components=learning.components or None,
            metrics=learning.metrics or None,
            curriculum=learning.curriculum or None,
            failures=dict(self._failures.counts.most_common()) or None,
            staleness=ages,
            staleness_mean=_mean_age(ages) if ages else None,
            staleness_max=max((age for age, count in ages.items() if count), default=None)
            if ages
            else None,
            generation_rate=status.generation_rate,
            training_rate=status.training_rate,
            overlap_share=status.overlap_share,
            waits=dict(self._waits) or None,
            dropped=dict(self._dropped) or None,
            stage_seconds=self._stage,
            pause_seconds=self._pause,
            trainer=dict(step.metrics) or None,
            totals=status.totals,
        )

    def _histograms(self, taken: Learning) -> dict[str, Histogram]:
        """Of what ended since the line before; what was trained is that of the step's own batch,
        not of one taken since.
        """
        ended = {
            name: found
            for name, found in self._learning.histograms().items()
            if name != "trained_length"
        }
        return {**ended, **taken.histograms()}

    def _forget(self) -> None:
        """What a line says of rollouts, waits and commits is what happened since the line
        before.
        """
        self._rollouts = 0
        self._failures = Failures()
        self._learning = Learning()
        self._rewards: defaultdict[str, list[float]] = defaultdict(list)
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._dropped: Counter[str] = Counter()
        self._stage: float | None = None
        self._pause: float | None = None

    def _write(self, line: Line) -> None:
        self._file.write(_encode(line) + b"\n")
        self._file.flush()


def _mean_age(ages: Mapping[int, int]) -> float | None:
    tokens = sum(ages.values())
    return sum(age * count for age, count in ages.items()) / tokens if tokens else None


def _rewrite(path: Path, history: PastLines) -> None:
    """Replaces the file by the lines kept, in their order of time."""
    kept: list[Line] = [
        *history.steps,
        *history.evaluations,
        *history.alarms,
        *history.completions,
        *history.checkpoints,
        *history.members,
    ]
    kept += history.resumes
    lines = sorted(
        kept,
        key=lambda line: (
            line.version,
            not isinstance(line, StepLine),
            isinstance(line, ResumeLine),
        ),
    )
    write_whole(path, b"".join(_encode(line) + b"\n" for line in lines))


def write_whole(path: Path, data: bytes) -> None:
    """Replaces the file in one step, with its bytes on disk first; makes the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.new")
    with building.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    building.replace(path)


_log = logging.getLogger(__name__)


class Observers:
    """Each applies every fact, in order. An observer that fails is logged once, and hurts neither
    the run nor the others.
    """

    def __init__(
        self, observers: Sequence[facts.Record], *, of: Mapping[type, Sequence[facts.Record]] = {}
    ) -> None:
        """`of`: who applies the facts of a type, where most pass it over; to ask all of them about
        each costs more than what one does.
        """
        self._reported = set[facts.Record]()
        self._observers = observers
        self._of = of

    def apply(self, fact: facts.Fact) -> None:
        for observe in self._of.get(type(fact), self._observers):
            try:
                observe(fact)
            except Exception:
                if observe not in self._reported:
                    self._reported.add(observe)
                    _log.exception(
                        (
                            "an observer (%s) failed on %s; the run goes on, later failures of it "
                            "are not logged"
                        ),
                        observe,
                        fact,
                    )
