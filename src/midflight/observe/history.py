"""The contents of a journal, read from its file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from midflight.errors import ConfigError
from midflight.observe.lines import (
    AlarmLine,
    CheckpointLine,
    CompletionsLine,
    EvaluationLine,
    Line,
    MemberLine,
    ResumeLine,
    StepLine,
    decode_line,
)
from midflight.observe.run_state import RunState
from midflight.observe.status import Status, Totals, idle_times
from midflight.types import Version, facts

SURVIVING = ("trained_tokens", "max_token_staleness")
"""The totals that count steps. A resumed run that has lost steps loses their share of these."""


@dataclass(frozen=True, slots=True)
class JournalHistory:
    """The lines of a journal, in order."""

    steps: tuple[StepLine, ...] = ()
    evaluations: tuple[EvaluationLine, ...] = ()
    alarms: tuple[AlarmLine, ...] = ()
    completions: tuple[CompletionsLine, ...] = ()
    checkpoints: tuple[CheckpointLine, ...] = ()
    members: tuple[MemberLine, ...] = ()
    resumes: tuple[ResumeLine, ...] = ()

    @property
    def version(self) -> Version:
        """The version that the last step made, or 0 before the first step."""
        return self.steps[-1].version if self.steps else 0

    @property
    def newest_start(self) -> Sequence[StepLine]:
        """The steps since the training phase was begun for the last time: a run that goes on after
        its end or after a crash begins a new one. Lines of an earlier version of Midflight, which
        do not tell its length, belong to an earlier start.
        """
        first = 0
        for number, (before, line) in enumerate(pairwise(self.steps), start=1):
            if not 0 < before.training_seconds <= line.training_seconds:
                first = number
        return self.steps[first:]

    @property
    def trained_ages(self) -> dict[int, int]:
        """Trained tokens by their age in versions."""
        found = Counter[int]()
        for line in self.steps:
            found.update(line.staleness or {})
        return dict(found)

    @classmethod
    def of(cls, lines: Iterable[Line]) -> JournalHistory:
        kept = tuple(lines)
        return cls(
            steps=tuple(line for line in kept if isinstance(line, StepLine)),
            evaluations=tuple(line for line in kept if isinstance(line, EvaluationLine)),
            alarms=tuple(line for line in kept if isinstance(line, AlarmLine)),
            completions=tuple(line for line in kept if isinstance(line, CompletionsLine)),
            checkpoints=tuple(line for line in kept if isinstance(line, CheckpointLine)),
            members=tuple(line for line in kept if isinstance(line, MemberLine)),
            resumes=tuple(line for line in kept if isinstance(line, ResumeLine)),
        )

    @property
    def seconds(self) -> float:
        """The seconds that the run had run when the last of these lines was written."""
        latest = 0.0
        for lines in (self.steps, self.evaluations, self.resumes):
            for line in lines:
                latest = max(latest, line.seconds)
        return latest

    def status(self) -> Status:
        """The status of the run when its last step was made, as far as these lines tell it."""
        state = RunState(name="", clock=lambda: 0.0)
        for line in self.evaluations:
            state.apply(_as_fact(line))
        if not self.steps:
            return replace(state.status(), seconds=self.seconds)
        last = self.steps[-1]
        state.restore(
            step=last.step, version=last.version, totals=last.totals, seconds=self.seconds
        )
        waits = defaultdict[str, float](float)
        failures = Counter[str]()
        for line in self.newest_start:
            failures.update(line.failures or {})
            for who, seconds in (line.waits or {}).items():
                waits[who] += seconds
        return replace(
            state.status(),
            training_seconds=last.training_seconds,
            overlap_share=last.overlap_share,
            engine_busy=last.engine_busy,
            trainer_busy=last.trainer_busy,
            slots_used=last.slots_used,
            bound=last.bound,
            advice=last.advice,
            digest="" if last.digests is None else last.digests.chain,
            waits=idle_times(waits, last.training_seconds),
            failures=dict(failures.most_common()),
        )

    def restore(self, state: RunState, everything: JournalHistory) -> None:
        """Lets the state go on from these lines, which survive: from their steps and evaluations.
        `everything` also holds the lines that were lost.
        """
        step = self.steps[-1].step if self.steps else 0
        survived = self.steps[-1].totals if self.steps else Totals()
        surviving = {name: getattr(survived, name) for name in SURVIVING}
        state.restore(
            step=step,
            version=self.version,
            totals=replace(everything._highest_totals(), **surviving),
            seconds=everything.seconds,
        )
        for line in self.evaluations:
            state.apply(_as_fact(line))

    def _highest_totals(self) -> Totals:
        """The largest value of each total in any line."""
        counted = [asdict(line.totals) for line in self.steps]
        counted += [asdict(line.totals) for line in self.resumes]
        if not counted:
            return Totals()
        highest = counted[0]
        for totals in counted[1:]:
            for name, value in totals.items():
                highest[name] = max(highest[name], value)
        return Totals(**highest)


def _as_fact(line: EvaluationLine) -> facts.Evaluated:
    return facts.Evaluated(
        line.version,
        line.source,
        line.num_tasks,
        line.mean_reward,
        line.num_failed,
        line.error,
        line.at,
    )


def read_journal(path: Path, *, until: Version | None = None) -> JournalHistory:
    """The lines of a journal, up to a version. A last line that a crash cut short is left out; a
    missing file is empty.
    """
    found = _lines_of(path)
    if until is not None:
        found = [line for line in found if line.version <= until]
    return JournalHistory.of(found)


def _lines_of(path: Path) -> Sequence[Line]:
    if not path.exists():
        return []
    whole_lines = path.read_bytes().split(b"\n")[:-1]
    return [
        _decoded(path, number, line)
        for number, line in enumerate(whole_lines, start=1)
        if line.strip()
    ]


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
