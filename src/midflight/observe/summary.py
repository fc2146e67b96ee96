"""`summary.json`: the result of the run, in the numbers by which it is judged."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from midflight.observe.atomic_write import write_whole
from midflight.observe.history import read_journal
from midflight.observe.status import LearningStatus, SourceStatus, Status
from midflight.types import Accounts


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """One source: the mean reward on its held-out tasks before and after training, sampled at the
    policy's temperature.
    """

    heldout_before: float | None
    heldout_after: float | None
    num_heldout: int
    reward: float | None
    failed_before: int = 0
    failed_after: int = 0
    incomplete: bool = False
    """Too many tasks are without a score to compare the two."""


@dataclass(frozen=True, slots=True)
class StartNotes:
    """The remarks that the run printed at its start."""

    loss: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The keys of `summary.json`, which docs/metrics.md defines. The scores of the primary source
    have keys of their own, those of all sources are under `sources`.
    """

    name: str
    primary: str | None
    heldout_before: float | None
    heldout_after: float | None
    seconds: float
    start_seconds: float
    peak_memory_mb: float
    steps: int
    version: int
    weight_updates: int
    rollouts: int
    rollouts_spanning_versions: int
    failed_rollouts: int
    failed_requests: int
    generated_tokens: int
    trained_tokens: int
    max_token_staleness: int
    overlap_share: float | None
    engine_busy: float | None
    trainer_busy: float | None
    bound: str
    advice: str
    loss: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    slots_used: float | None = None
    turns_mean: float | None = None
    learning: LearningStatus = field(default_factory=LearningStatus)
    failures: dict[str, int] = field(default_factory=dict[str, int])
    sources: dict[str, SourceSummary] = field(default_factory=dict[str, SourceSummary])
    waits: dict[str, float] = field(default_factory=dict[str, float])
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    accounts: Accounts | None = None


def past_seconds(folder: Path) -> float:
    """Returns the seconds that the run in this folder has run before it goes on. They come from its
    last summary, or from its journal if it was killed since.
    """
    path = folder / "summary.json"
    seconds = 0.0
    if path.exists():
        seconds = msgspec.json.decode(path.read_bytes()).get("seconds", 0.0)
    return max(seconds, read_journal(folder / "metrics.jsonl").seconds)


def summarise(
    status: Status,
    *,
    primary: str | None,
    seconds: float,
    peak_memory_mb: float,
    before: float = 0.0,
    said: StartNotes = StartNotes(),
) -> Summary:
    """Returns the summary of a run from its last status. `primary` is the source whose held-out
    score counts; `before` is the time that the starts before this one ran, in seconds.
    """
    sources = {source.name: _source_summary(source) for source in status.sources}
    first = sources.get(primary) if primary is not None else None
    waits = {f"{wait.who} for {wait.for_whom}": round(wait.seconds, 3) for wait in status.waits}
    return Summary(
        name=status.name,
        primary=primary,
        heldout_before=first.heldout_before if first else None,
        heldout_after=first.heldout_after if first else None,
        seconds=round(before + seconds, 3),
        start_seconds=round(seconds, 3),
        peak_memory_mb=round(peak_memory_mb, 1),
        steps=status.step,
        version=status.version,
        **asdict(status.totals),
        overlap_share=status.overlap_share,
        engine_busy=status.engine_busy,
        trainer_busy=status.trainer_busy,
        bound=status.bound.value,
        advice=status.advice,
        slots_used=status.slots_used,
        loss=said.loss,
        notes=said.notes,
        turns_mean=status.learning.turns_mean,
        learning=status.learning,
        failures=status.failures,
        sources=sources,
        waits=waits,
        dropped=status.dropped,
        accounts=status.accounts,
    )


def _source_summary(source: SourceStatus) -> SourceSummary:
    return SourceSummary(
        heldout_before=source.heldout_before,
        heldout_after=source.heldout_last,
        num_heldout=source.num_heldout,
        reward=source.reward,
        failed_before=source.failed_before,
        failed_after=source.failed_last,
        incomplete=source.is_incomplete,
    )


def write_summary(summary: Summary, path: Path) -> None:
    """The file is there whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
