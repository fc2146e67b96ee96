"""`summary.json`: how the run went, in the numbers by which it is judged; and the same as the last
table of the terminal.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from midflight.observe.failures import most_common
from midflight.observe.journal import read_journal, write_whole
from midflight.observe.status import LearningStatus, Status, busy_words, duration, heldout, percent
from midflight.observe.terminal import learning
from midflight.types import Accounts


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """Mean reward on held-out tasks of one source, sampled at the policy's temperature, before and
    after training.
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
class Said:
    """What was said at the start."""

    loss: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """docs/metrics.md defines every key. Those of the primary source stand alone, all sources under
    `sources`.
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
    """That a run which goes on in this folder has run for: as its last summary says, or its
    journal, where it was killed since.
    """
    summary = folder / "summary.json"
    said = (
        msgspec.json.decode(summary.read_bytes()).get("seconds", 0.0) if summary.exists() else 0.0
    )
    return max(said, read_journal(folder / "metrics.jsonl").seconds)


def summarise(
    status: Status,
    *,
    primary: str | None,
    seconds: float,
    peak_memory_mb: float,
    before: float = 0.0,
    said: Said = Said(),
) -> Summary:
    """From the last status. `primary` is the source whose held-out score counts; `before` are the
    seconds of the starts before this one.
    """
    sources = {
        s.name: SourceSummary(
            s.heldout_before,
            s.heldout_last,
            s.num_heldout,
            s.reward,
            s.failed_before,
            s.failed_last,
            s.is_incomplete,
        )
        for s in status.sources
    }
    first = sources.get(primary) if primary is not None else None
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
        waits={f"{wait.who} for {wait.for_whom}": round(wait.seconds, 3) for wait in status.waits},
        dropped=status.dropped,
        accounts=status.accounts,
    )


def write_summary(summary: Summary, path: Path) -> None:
    """The file is there whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def summary_table(summary: Summary, status: Status) -> Table:
    """The end of `midflight train`. `status` is what the summary was made of."""
    table = Table(
        title=f"{summary.name}: {summary.steps} steps in {duration(summary.seconds)}",
        box=box.ROUNDED,
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column()
    for source in status.sources:
        table.add_row(
            f"held-out {source.name}",
            heldout(source),
            style="yellow" if source.is_incomplete else "",
        )
    share = f" of {summary.rollouts:,}" if summary.rollouts else ""
    table.add_row("weights went live", f"{summary.weight_updates} times")
    table.add_row("rollouts spanning versions", f"{summary.rollouts_spanning_versions:,}{share}")
    table.add_row(
        "failed requests, rollouts", f"{summary.failed_requests}, {summary.failed_rollouts}"
    )
    if summary.failures:
        table.add_row("failed by", most_common(Counter(summary.failures)), style="yellow")
    if (a := summary.accounts) is not None:
        waiting = a.running + a.waiting + a.leased
        table.add_row(
            "groups",
            f"{a.trained:,} trained, {waiting:,} not yet, {sum(a.dropped.values()):,} dropped",
        )
    table.add_row(
        "tokens trained", f"{summary.trained_tokens:,} of {summary.generated_tokens:,} generated"
    )
    for label, text in learning(status):
        table.add_row(label, text)
    table.add_row("oldest trained token", f"{summary.max_token_staleness} versions")
    table.add_row("engine and trainer busy together", percent(summary.overlap_share))
    busy = busy_words(
        engine_busy=summary.engine_busy,
        trainer_busy=summary.trainer_busy,
        slots_used=summary.slots_used,
    )
    table.add_row("who was busy", f"{busy}: {summary.bound}")
    if summary.advice:
        table.add_row("advice", summary.advice)
    table.add_row("peak memory", f"{summary.peak_memory_mb:,.0f} MB")
    for label, lines in (("loss", summary.loss), ("notes", summary.notes)):
        if lines:
            table.add_row(label, Text("\n".join(lines)))  # its brackets are no markup
    return table
