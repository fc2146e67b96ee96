"""Writes `metrics.jsonl`: one line per step, evaluation and alarm, each complete as soon as it is
written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec

from midflight.errors import naming_file
from midflight.observe.atomic_write import write_whole
from midflight.observe.failures import Failures
from midflight.observe.history import JournalHistory, read_journal
from midflight.observe.learning import LEARNED_FROM, Histogram, Learning
from midflight.observe.lines import (
    AlarmLine,
    CheckpointLine,
    CompletionsLine,
    EvaluationLine,
    Line,
    MemberLine,
    ResumeLine,
    StepLine,
    encode_line,
)
from midflight.observe.run_state import RunState
from midflight.observe.status import Status, is_incomplete, mean_age, oldest_age
from midflight.observe.timeline import TIMED, TIMELINE, Timeline
from midflight.types import Kind, Version, facts


class Journal:
    """Writes the journal as facts come in. It applies each fact after `state` has, because it
    writes the counts of `state`.
    """

    def __init__(self, path: Path, state: RunState, *, resume_at: Version | None = None) -> None:
        """Starts the file anew. With `resume_at` it keeps the lines up to that version, and `state`
        goes on from them; later lines describe steps that did not survive.
        """
        self._state = state
        self._path = path
        history = JournalHistory()
        if resume_at is not None:
            history = read_journal(path, until=resume_at)
            history.restore(state, read_journal(path))
            history = self._resumed(history, resume_at)
        self._begin(history)
        self._timeline = Timeline(path.with_name(TIMELINE), state, goes_on=resume_at is not None)

    def _resumed(self, history: JournalHistory, at: Version) -> JournalHistory:
        resumed = ResumeLine(
            version=at,
            step=self._state.step,
            seconds=self._state.seconds,
            totals=self._state.totals,
        )
        return replace(history, resumes=(*history.resumes, resumed))

    def _begin(self, history: JournalHistory) -> None:
        self._steps = {line.version for line in history.steps}
        self._evaluations = {(line.version, line.source) for line in history.evaluations}
        self._groups: dict[Version, tuple[int, dict[int, int], Learning]] = {}
        self._digests: dict[Version, str] = {}
        """The digests of steps that are in no checkpoint yet."""
        self._line_before: tuple[float, int] | None = None
        """The second of the run at the last step's line, and the tokens generated until then."""
        _rewrite(self._path, history)
        self._file = self._path.open("ab")
        self._forget()

    def _go_back(self, checkpoint: Version) -> None:
        """Keeps the lines up to the checkpoint: the trainer goes on from it while this process
        lives.
        """
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
                if fact.digests is not None:
                    self._digests[version] = fact.digests.chain
                self._write(self._step_line(fact))
                self._forget()
            case facts.Evaluated():
                self._evaluated(fact)
            case facts.CompletionsShown(version=version, rollouts=shown):
                line = CompletionsLine(
                    version=version,
                    step=self._state.step,
                    seconds=self._state.seconds,
                    rollouts=shown,
                )
                self._write(line)
            case facts.Checkpointed(version=version):
                line = CheckpointLine(
                    version=version,
                    step=self._state.step,
                    seconds=self._state.seconds,
                    digest=self._digests.get(version, ""),
                )
                self._digests = {v: kept for v, kept in self._digests.items() if v > version}
                self._write(line)
            case facts.EngineJoined() | facts.EngineLeft():
                self._write(self._member_line(fact))
            case facts.WentBack(checkpoint=checkpoint):
                self._go_back(checkpoint)
            case facts.Alarmed():
                self._write(self._alarm_line(fact))
            case _:
                pass

    def _leased(self, fact: facts.Leased) -> None:
        """Keeps the batch under the version that it will be trained at: if batches are prefetched,
        it is taken before the step before it ends.
        """
        train_version = fact.batch.train_version
        oldest = train_version - 2
        self._groups = {
            version: taken for version, taken in self._groups.items() if version >= oldest
        }
        taken = Learning()
        taken.apply(fact)
        ages = dict(sorted(fact.staleness.items()))
        self._groups[train_version] = (len(fact.batch.groups), ages, taken)

    def _evaluated(self, score: facts.Evaluated) -> None:
        if (score.version, score.source) in self._evaluations:
            return
        self._evaluations.add((score.version, score.source))
        self._write(self._evaluation_line(score))

    def _member_line(self, fact: facts.EngineJoined | facts.EngineLeft) -> MemberLine:
        if isinstance(fact, facts.EngineJoined):
            event = "joined"
            detail = fact.url
        else:
            event = "left"
            detail = fact.why
        status = self._state.status()
        return MemberLine(
            version=status.version,
            step=status.step,
            seconds=status.seconds,
            engine=fact.engine,
            event=event,
            detail=detail,
        )

    def _alarm_line(self, alarm: facts.Alarmed) -> AlarmLine:
        status = self._state.status()
        return AlarmLine(
            version=status.version,
            step=status.step,
            seconds=status.seconds,
            name=alarm.name,
            text=alarm.text,
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
        rewards = list(chain.from_iterable(self._rewards.values()))
        by_source = {name: _mean(found) for name, found in self._rewards.items()}
        return StepLine(
            step=status.step,
            version=step.version,
            seconds=status.seconds,
            step_seconds=step.ended - step.started,
            eta_seconds=status.eta_seconds,
            tokens=step.num_tokens,
            digests=step.digests,
            groups=groups,
            rollouts=self._rollouts,
            reward=_mean(rewards) if rewards else None,
            reward_by_source=by_source or None,
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
            staleness_mean=mean_age(ages or {}),
            staleness_max=oldest_age(ages or {}),
            generation_rate=self._generation_rate(status),
            training_rate=status.training_rate,
            training_seconds=status.training_seconds,
            overlap_share=status.overlap_share,
            engine_busy=status.engine_busy,
            trainer_busy=status.trainer_busy,
            slots_used=status.slots_used,
            bound=status.bound,
            advice=status.advice,
            waits=dict(self._waits) or None,
            dropped=dict(self._dropped) or None,
            stage_seconds=self._stage,
            pause_seconds=self._pause,
            trainer=dict(step.metrics) or None,
            totals=status.totals,
        )

    def _generation_rate(self, status: Status) -> float:
        """The rate since the line before. The first line of a process has that of the last
        seconds.
        """
        before = self._line_before
        self._line_before = (status.seconds, status.totals.generated_tokens)
        if before is None or status.seconds <= before[0]:
            return status.generation_rate
        return (status.totals.generated_tokens - before[1]) / (status.seconds - before[0])

    def _histograms(self, taken: Learning) -> dict[str, Histogram]:
        """The histograms of the rollouts that ended since the line before. The trained lengths are
        those of the step's own batch, not of one taken since.
        """
        found = self._learning.histograms()
        found.pop("trained_length", None)
        return found | taken.histograms()

    def _forget(self) -> None:
        """Begins the counts anew: a line counts the rollouts, waits and commits since the line
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
        with naming_file(self._path):
            self._file.write(encode_line(line) + b"\n")
            self._file.flush()


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _rewrite(path: Path, history: JournalHistory) -> None:
    """Replaces the file by the lines kept, in their order of time."""
    kept: list[Line] = []
    kept += history.steps
    kept += history.evaluations
    kept += history.alarms
    kept += history.completions
    kept += history.checkpoints
    kept += history.members
    kept += history.resumes
    kept.sort(key=_place_in_time)
    write_whole(path, b"".join(encode_line(line) + b"\n" for line in kept))


def _place_in_time(line: Line) -> tuple[Version, bool, bool]:
    """Returns the sort key of a line. The step that made a version comes before all other lines of
    that version, and a resume comes last.
    """
    return line.version, not isinstance(line, StepLine), isinstance(line, ResumeLine)
