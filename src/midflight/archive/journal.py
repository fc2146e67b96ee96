"""A run's journal as points: all of it at first, then what was appended since the last look, also
while a run writes it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from midflight.errors import RunGone
from midflight.observe.history import PastLines
from midflight.observe.lines import Line, decode_line
from midflight.observe.named import named

JOURNAL = "metrics.jsonl"
MARK_BYTES = 64
"""Of what was read last, compared at the next look: a file that was written anew may have the
number of the one before.
"""


class Tail:
    """The whole lines of a file that nobody has read yet. A line that a crash cut short, or that is
    being written, waits for its end.
    """

    def __init__(self, path: Path, *, newest: int | None = None) -> None:
        """`newest`: bytes of a file that is longer are all that is read of it at first."""
        self._path = path
        self._newest = newest
        self._file = 0
        self._read = 0
        self._mark = b""

    def new(self) -> tuple[bool, list[bytes]]:
        """Whether the file was written anew since the last look, as after a crash, and the lines;
        from its beginning then.

        A file that is not there has no lines.
        """
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                marked = self._read - len(self._mark)
                file.seek(marked)
                goes_on = self._file == found.st_ino and file.read(len(self._mark)) == self._mark
                begin = (
                    self._read
                    if goes_on
                    else max(0, found.st_size - (self._newest or found.st_size))
                )
                file.seek(begin)
                if begin and not goes_on:
                    begin += len(file.readline())  # the rest of one
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            was_there = self._file
            self._file = 0
            self._read = 0
            self._mark = b""
            return was_there != 0, []
        anew = self._file != 0 and not goes_on
        whole += newline
        self._mark = ((self._mark if goes_on else b"") + whole)[-MARK_BYTES:]
        self._file = found.st_ino
        self._read = begin + len(whole)
        return anew, [line for line in whole.split(b"\n") if line.strip()]


class Readings:
    """What the journal of a run said so far. Lines that a later version of Midflight wrote, and
    that this one cannot read, are counted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder / JOURNAL)
        self._lines: list[Line] = []
        self._past: PastLines | None = None
        self.num_unread = 0

    def refresh(self) -> bool:
        """Reads what was appended; everything again where a resumed run has dropped lines of lost
        steps. Whether anything is new.

        `RunGone` where the folder is not there any more.
        """
        if not self._folder.is_dir():
            raise RunGone(
                f"{self._folder} is not there any more: the run was deleted or moved while it was "
                "looked at."
            )
        anew, lines = self._tail.new()
        if anew:
            self._lines.clear()
            self.num_unread = 0
        for line in lines:
            try:
                self._lines.append(decode_line(line))
            except msgspec.DecodeError:
                self.num_unread += 1
        if anew or lines:
            self._past = None
        return anew or bool(lines)

    @property
    def past(self) -> PastLines:
        """By kind, each in order of time."""
        self._past = self._past or PastLines.of(self._lines)
        return self._past

    def points(self, name: str) -> list[tuple[int, float]]:
        """Step and value of one of the names for dashboards (docs/metrics.md), where it was
        measured.
        """
        return [
            (line.step, found[name])
            for line in (*self.past.steps, *self.past.evaluations)
            if name in (found := named(line))
        ]

    def names(self) -> list[str]:
        """Of everything that was measured in some step or evaluation, in order."""
        return sorted(set(self._names()))

    def _names(self) -> Iterator[str]:
        for line in (*self.past.steps, *self.past.evaluations):
            yield from named(line)


def read_folder(folder: Path) -> Readings:
    """All that the journal says now."""
    readings = Readings(folder)
    readings.refresh()
    return readings
