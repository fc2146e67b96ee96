"""`summary.json`: the result of the run, in the numbers by which it is judged."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from midflight.observe.atomic_write import write_whole
from midflight.observe.history import JournalHistory, read_journal
from midflight.observe.status import (
    Bound,
    IdleTime,
    LearningStatus,
    SourceStatus,
    Status,
    idle_times,
)
from midflight.types import Accounts

SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True)
class StartNotes:
    """The remarks that the run printed at its start."""

    loss: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The keys of `summary.json`. Keys without a text here mean what they do in `Totals`, `Status`
    and `LearningStatus`. The scores of the primary source have keys of their own, those of all
    sources are under `sources`.

    Everything that shows a run's figures takes them from here: the launcher makes a summary of the
    last status of the run, and `summary_of` reads one, or makes one of a run's journal.
    """

    name: str = ""
    """`run.name`."""
    primary: str | None = None
    """The first source, whose held-out scores stand alone."""
    heldout_before: float | None = None
    heldout_after: float | None = None
    """`heldout_before`, `heldout_after`: Its mean held-out reward at the policy's temperature, after
    the warm start and with the last version.
    """
    seconds: float = 0.0
    start_seconds: float = 0.0
    training_seconds: float = 0.0
    peak_memory_mb: float | None = None
    """Largest sum of the proportional set sizes of all processes. Null if the run has not ended in
    order.
    """
    steps: int = 0
    version: int = 0
    """`steps`, `version`: Steps of reinforcement learning, and the last version."""
    weight_updates: int = 0
    rollouts: int = 0
    rollouts_spanning_versions: int = 0
    failed_rollouts: int = 0
    failed_requests: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    max_token_staleness: int = 0
    overlap_share: float | None = None
    engine_busy: float | None = None
    trainer_busy: float | None = None
    bound: Bound = Bound.UNKNOWN
    advice: str = ""
    loss: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """`loss`, `notes`: The loss with every default, and what in the configuration may surprise its
    author.
    """
    slots_used: float | None = None
    turns_mean: float | None = None
    learning: LearningStatus = field(default_factory=LearningStatus)
    """`turns_mean`, `learning`: Of the last 256 training rollouts with a reward: mean answers of the
    model; `reward_spread` and the like, as above.
    """
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    masked_by: Mapping[str, int] = field(default_factory=dict[str, int])
    replaced: Mapping[str, int] = field(default_factory=dict[str, int])
    sources: Mapping[str, SourceStatus] = field(default_factory=dict[str, SourceStatus])
    """Each source has `heldout_before`, `heldout_after`, `num_heldout`, `failed_before`,
    `failed_after`, `incomplete`, `num_rollouts`, and `reward`, the mean of its last 256 rollouts.
    """
    waits: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds that a part waited for another one. `trainer for generation` is such a key."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Dropped groups by reason."""
    accounts: Accounts | None = None
    """Where all groups are (`submitted` is the sum: running, waiting, leased, trained, dropped), and
    all tokens (`received_tokens`: waiting, trained, masked, dropped).
    """
    digest: str = ""
    """The digest of all steps (docs/audit.md)."""

    @property
    def idle_times(self) -> tuple[IdleTime, ...]:
        """Who waited for whom in the training phase, longest first."""
        return idle_times(self.waits, self.training_seconds)


def past_seconds(folder: Path) -> float:
    """Returns the seconds that the run in this folder has run before it goes on. They come from its
    last summary, or from its journal if it was killed since.
    """
    ended = _read(folder)
    seconds = 0.0 if ended is None else ended.seconds
    return max(seconds, read_journal(folder / "metrics.jsonl").seconds)


def summary_of(folder: Path, past: JournalHistory) -> Summary:
    """The figures of the run in a folder, so far. `past` is its journal. They are those of its
    summary, or those of its last step if that was made since.
    """
    ended = _read(folder)
    if ended is not None and ended.version >= past.version:
        return ended
    first = past.evaluations[0].source if past.evaluations else None
    return summarise(past.status(), primary=first)


def _read(folder: Path) -> Summary | None:
    """The summary in a folder. None if there is none, or if it is being written."""
    try:
        return msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Summary)
    except (OSError, msgspec.MsgspecError):
        return None


def summarise(
    status: Status,
    *,
    primary: str | None,
    seconds: float | None = None,
    peak_memory_mb: float | None = None,
    before: float = 0.0,
    said: StartNotes = StartNotes(),
) -> Summary:
    """Returns the summary of a run from its last status. `primary` is the source whose held-out
    score counts. `seconds` is the time that this start ran, and `before` the time that the starts
    before it ran; without `seconds` the status knows the time.
    """
    if seconds is None:
        before = status.seconds - status.start_seconds
        seconds = status.start_seconds
    sources = {source.name: source for source in status.sources}
    first = sources.get(primary or "", SourceStatus())
    return Summary(
        name=status.name,
        primary=primary,
        heldout_before=first.heldout_before,
        heldout_after=first.heldout_after,
        seconds=round(before + seconds, 3),
        start_seconds=round(seconds, 3),
        training_seconds=round(status.training_seconds, 3),
        peak_memory_mb=None if peak_memory_mb is None else round(peak_memory_mb, 1),
        steps=status.step,
        version=status.version,
        **asdict(status.totals),
        overlap_share=status.overlap_share,
        engine_busy=status.engine_busy,
        trainer_busy=status.trainer_busy,
        bound=status.bound,
        advice=status.advice,
        digest=status.digest,
        slots_used=status.slots_used,
        loss=said.loss,
        notes=said.notes,
        turns_mean=status.learning.turns_mean,
        learning=status.learning,
        failures=status.failures,
        masked_by=status.masked_by,
        replaced=status.replaced,
        sources=sources,
        waits={str(wait): round(wait.seconds, 3) for wait in status.waits},
        dropped=status.dropped,
        accounts=status.accounts,
    )


def write_summary(summary: Summary, path: Path) -> None:
    """The file is there whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
