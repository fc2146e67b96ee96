"""What `handover.py` measured, and its tables: medians over the rounds of one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One handover. Seconds."""

    engine: str
    way: str
    """A transport, or `reload`."""
    num_bytes: int
    normal_gap: float
    """Between tokens of a stream, before the weights are final and after they are served; median."""
    gap_before: float
    """The largest while weights are published and staged, or saved; median over streams, as the next."""
    gap: float
    """The largest around the change of weights."""
    copy_seconds: float
    """A plain copy of the same tensors, in the trainer, just before."""
    copy_cpu: float
    wait_seconds: float
    """Until the trainer may change its weights again."""
    wait_cpu: float
    stage_seconds: float
    """In the background; 0 for a reload."""
    change_seconds: float
    """Commit, or pause, reload and resume."""
    total_seconds: float
    """From the moment the weights are final until they are served."""
    total_cpu: float
    """Of all processes in that time, decoding included."""

    @property
    def pause(self) -> float:
        return self.gap - self.normal_gap


def report(samples: Sequence[Sample]) -> None:
    """Two markdown tables: what requests see, and what the trainer and the way take."""
    rows = [[s for s in samples if (s.engine, s.way) == key] for key in dict.fromkeys((s.engine, s.way) for s in samples)]
    print("| engine | way | normal gap | largest gap before | at the change | pause (of rounds) | reload's / this |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(seen_by_requests(row, _reloads(samples, row)))
    print(
        "\n| engine | way | MB | trainer waits (CPU) | plain copies | stage | of copy bandwidth | change | total (CPU) "
        "| reload's / this: wait | total |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(on_the_way(row, _reloads(samples, row)))


def seen_by_requests(row: Sequence[Sample], reloads: Sequence[Sample]) -> str:
    pauses = sorted(s.pause for s in row)
    return _line(
        row[0].engine,
        row[0].way,
        *(_ms(median(row, what)) for what in ("normal_gap", "gap_before", "gap")),
        f"{_ms(median(row, 'pause'))} ({1e3 * pauses[0]:.1f}-{1e3 * pauses[-1]:.1f})",
        _times(row, reloads, "pause"),
    )


def on_the_way(row: Sequence[Sample], reloads: Sequence[Sample]) -> str:
    staged = row[0].way != "reload"
    return _line(
        row[0].engine,
        row[0].way,
        f"{row[0].num_bytes / 1e6:.1f}",
        f"{_ms(median(row, 'wait_seconds'))} ({_ms(median(row, 'wait_cpu'))})",
        f"{statistics.median(s.wait_seconds / s.copy_seconds for s in row):.1f}",
        _ms(median(row, "stage_seconds")) if staged else "",
        f"{statistics.median(s.copy_seconds / s.stage_seconds for s in row):.0%}" if staged else "",
        _ms(median(row, "change_seconds")),
        f"{_ms(median(row, 'total_seconds'))} ({_ms(median(row, 'total_cpu'))})",
        _times(row, reloads, "wait_seconds"),
        _times(row, reloads, "total_seconds"),
    )


def median(row: Sequence[Sample], what: str) -> float:
    return statistics.median(getattr(s, what) for s in row)


def _reloads(samples: Sequence[Sample], row: Sequence[Sample]) -> list[Sample]:
    """Of the same engine; none for the row of reloads itself."""
    return [s for s in samples if s.engine == row[0].engine and s.way == "reload" != row[0].way]


def _times(row: Sequence[Sample], reloads: Sequence[Sample], what: str) -> str:
    return f"{median(reloads, what) / median(row, what):.1f}" if reloads and median(row, what) > 0 else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
