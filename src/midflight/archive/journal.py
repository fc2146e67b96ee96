"""Reads a run's journal while the run may still write it: first the whole journal, and later the
lines that were appended.
"""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from midflight.errors import RunGone
from midflight.observe.history import JournalHistory
from midflight.observe.lines import EvaluationLine, Line, StepLine, decode_line
from midflight.observe.metrics import metrics_of, points_of

JOURNAL = "metrics.jsonl"
MARK_BYTES = 64
"""The number of the last bytes read that are compared at the next read. They are needed because a
new file may have the inode number of the one before.
"""


class Tail:
    """Gives the whole lines of a file that it has not given yet. A line that a crash cut short, or
    that is being written, is not given before it ends.
    """

    def __init__(self, path: Path, *, newest: int | None = None) -> None:
        """With `newest` only that many bytes of a longer file are read at first."""
        self._path = path
        self._newest = newest
        self._file = 0
        self._read = 0
        self._mark = b""

    def new(self) -> tuple[bool, list[bytes]]:
        """Returns whether the file was written anew since the last call, as after a crash, and the
        new lines. If it was written anew, these are all its lines.

        A file that is not there has no lines.
        """
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                marked = self._read - len(self._mark)
                file.seek(marked)
                goes_on = self._file == found.st_ino and file.read(len(self._mark)) == self._mark
                if goes_on:
                    begin = self._read
                elif self._newest:
                    begin = max(0, found.st_size - self._newest)
                else:
                    begin = 0
                file.seek(begin)
                if begin and not goes_on:
                    begin += len(file.readline())  # the rest of a line
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            was_there = self._file
            self._file = 0
            self._read = 0
            self._mark = b""
            return was_there != 0, []
        anew = self._file != 0 and not goes_on
        whole += newline
        before = self._mark if goes_on else b""
        self._mark = (before + whole)[-MARK_BYTES:]
        self._file = found.st_ino
        self._read = begin + len(whole)
        return anew, [line for line in whole.split(b"\n") if line.strip()]


class JournalReader:
    """The lines of a run's journal so far. Lines that a later version of Midflight wrote, and that
    this one cannot read, are only counted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder / JOURNAL)
        self._lines: list[Line] = []
        self._past: JournalHistory | None = None
        self.num_unread = 0

    def refresh(self) -> bool:
        """Reads the appended lines, and returns whether there were any. It reads everything again
        if a resumed run has dropped the lines of lost steps.

        Raises `RunGone` if the folder is not there any more.
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
    def past(self) -> JournalHistory:
        """The lines by kind, each kind in the order of time."""
        self._past = self._past or JournalHistory.of(self._lines)
        return self._past

    def points(self, name: str) -> list[tuple[float, float]]:
        """Returns step and value of one of the names for dashboards (docs/metrics.md), for each
        step that measured it.
        """
        return points_of(self._measured(), name)

    def names(self) -> list[str]:
        """The names of everything that was measured in some step or evaluation, in order."""
        found = set[str]()
        for line in self._measured():
            found.update(metrics_of(line))
        return sorted(found)

    def _measured(self) -> Iterator[StepLine | EvaluationLine]:
        return chain(self.past.steps, self.past.evaluations)


def read_folder(folder: Path) -> JournalReader:
    """Everything that the journal of a run holds now."""
    readings = JournalReader(folder)
    readings.refresh()
    return readings
