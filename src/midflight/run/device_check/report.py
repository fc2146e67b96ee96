"""The report on a device: one line for each thing that was tried, as JSON and as a page. It needs no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from midflight.observe.atomic_write import write_whole
from midflight.observe.readable import duration, table_cell


class TrialOutcome(StrEnum):
    """What became of a trial."""

    WORKS = "works"
    FAILED = "failed"
    NOT_TRIED = "not tried"
    """It cannot be tried on this machine."""


class DeviceTrial(msgspec.Struct, frozen=True, tag=True):
    """One thing that was tried on the device."""

    what: str
    outcome: TrialOutcome
    found: str
    """The numbers of what works, the error of what failed, and the reason why something was not
    tried.
    """
    limit: str = ""
    """The bound on the number that was found, where there is one."""
    remedy: str = ""
    """The option that avoids what failed."""
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """What was found in one line of text. An error that has more is cut."""
        said = self.found.partition("\n")[0]
        if self.limit:
            said += f", of {self.limit}"
        if self.remedy:
            said += f"; {self.remedy}"
        return said


class CheckedDevice(msgspec.Struct, frozen=True, tag=True):
    """The device, and what computes on it."""

    title: str
    """The name of the device, as its maker has it."""
    versions: dict[str, str]
    """The versions of Midflight, Python and the packages that compute."""
    memory: int = 0
    """The bytes of its memory that are free. 0 if it has none of its own."""


class Part(msgspec.Struct, frozen=True):
    """The trials of one path, which were made in a process of their own."""

    name: str
    trials: tuple[DeviceTrial, ...]
    seconds: float = 0.0


class DeviceReport(msgspec.Struct, frozen=True):
    """All that was found on one device of one machine."""

    device: str
    title: str
    """The name of the device, as its maker has it."""
    date: str
    """The day and the minute at which it ended, as ISO 8601 with the offset from UTC."""
    versions: dict[str, str]
    """The versions of Midflight, Python and the packages that compute."""
    seconds: float
    parts: tuple[Part, ...]

    def trials(self, outcome: TrialOutcome) -> Sequence[DeviceTrial]:
        """The trials that ended so."""
        return [t for part in self.parts for t in part.trials if t.outcome is outcome]

    @property
    def verdict(self) -> str:
        """The report in one sentence."""
        failed = len(self.trials(TrialOutcome.FAILED))
        works = len(self.trials(TrialOutcome.WORKS))
        left = len(self.trials(TrialOutcome.NOT_TRIED))
        return (
            f"{works} of {works + failed} things that were tried on {self.device} work, {failed} "
            f"failed, {left} could not be tried on this machine"
        )


def write_report(report: DeviceReport, folder: Path) -> tuple[Path, Path]:
    """Writes the report as JSON and as a page in Markdown into the folder, which is made. Returns
    both paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"doctor-{report.device.replace(':', '-')}"
    as_json = folder / f"{stem}.json"
    as_page = folder / f"{stem}.md"
    data = msgspec.json.format(msgspec.json.encode(report), indent=2)
    write_whole(as_json, data + b"\n")
    write_whole(as_page, page(report).encode())
    return as_json, as_page


def page(report: DeviceReport) -> str:
    """The report as Markdown: the verdict, what failed with its remedy, then all of it."""
    lines = [f"# What works on {report.device}", "", f"{report.verdict}.", ""]
    lines += _table(("", ""), _facts(report))
    failed = report.trials(TrialOutcome.FAILED)
    if failed:
        lines += ["", "## What failed, and what avoids it", ""]
        lines += _table(
            ("what", "found", "avoid it"), ((t.what, t.found, t.remedy) for t in failed)
        )
    for part in report.parts:
        lines += ["", f"## {part.name}", ""]
        rows = [(t.what, t.outcome.value, t.found, t.limit) for t in part.trials]
        lines += _table(("what", "", "found", "limit"), rows)
    return "\n".join(lines) + "\n"


def _facts(report: DeviceReport) -> Iterator[tuple[str, str]]:
    yield "device", report.title
    yield "date", report.date
    yield "took", duration(report.seconds)
    yield from report.versions.items()


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[Sequence[str]]
) -> list[str]:
    lines = [_row(head), "|" + "---|" * len(head)]
    lines += [_row(row) for row in rows]
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(table_cell(cell) for cell in cells) + " |"
