"""Segment files, which hold the tokens of rollouts, beside the store's index.

A segment is only ever appended to, and is full at `SEGMENT_BYTES`. The index (`database`) has the
place of each rollout in them. A place is written after the bytes that it names, so that the death
of a process at any instant loses none of them. What a checkpoint relies on is on the disk itself
before the checkpoint copies the index. A process never appends to a segment of another: bytes of a
transaction that was cut short stay where they are, and no place names them.
"""

import logging
import os
import secrets
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from midflight.errors import StoreCorrupt, TokensRemoved
from midflight.trajectories.store_errors import naming, sync

SEGMENTS = "segments"
"""The name of the folder in that of the run, or of one of its gateways."""
SEGMENT_BYTES = 64 * 2**20
"""A segment is full at this size. It is also the least that `run.keep_trajectories` removes."""
GATHERED_BYTES = 2**20
"""Rows are written together up to this size. Each write gives the interpreter's lock away, and must
wait for it again.
"""
_SUFFIX = ".segment"
_REMOVED = ".removed"
_PLACE = struct.Struct("<BQQII")
_log = logging.getLogger(__name__)
_MARK = 0
"""The first byte of a place. Rows that lie in the index itself begin with that of an array."""


class SegmentPlace(NamedTuple):
    """Where the rows of a rollout lie."""

    segment: int
    """The name of the segment: a number drawn at random, which no other segment has."""
    offset: int
    length: int
    checksum: int

    def encode(self) -> bytes:
        return _PLACE.pack(_MARK, *self)


def place_of(value: bytes) -> SegmentPlace | None:
    """The place that a value of the index names. None if the value is the rows themselves, which a
    store of an older Midflight has, and which is shorter where a rollout has no rows.
    """
    if len(value) != _PLACE.size or value[0] != _MARK:
        return None
    return SegmentPlace(*_PLACE.unpack(value)[1:])


def segment_folders(folder: Path) -> tuple[Path, ...]:
    """The folders with the segments of a run, of all its gateways."""
    return folder / SEGMENTS, *sorted(folder.glob(f"shards/*/{SEGMENTS}"))


# --- Reading --------------------------------------------------------------------------------------


def read(folders: Sequence[Path], value: bytes) -> bytes:
    """The rows that a value of the index names. Raises `StoreCorrupt`, which names the segment, if
    they are damaged, and `TokensRemoved` if the run has removed them.
    """
    place = place_of(value)
    if place is None:
        return value
    name = f"{place.segment:016x}{_SUFFIX}"
    path = next((folder / name for folder in folders if (folder / name).exists()), None)
    if path is None:
        raise _missing([folder / name for folder in folders])
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            found = file.read(place.length)
    except FileNotFoundError:
        raise _missing([path]) from None
    except OSError as error:
        raise StoreCorrupt(
            f"Reading {path}: {error.strerror or error}; check the disk and the file's permissions."
        ) from error
    if len(found) != place.length or zlib.crc32(found) != place.checksum:
        raise StoreCorrupt(
            f"Reading {path}: the {place.length} bytes at {place.offset} are not those that were "
            "written; restore the file from a copy. All other rollouts can be read."
        )
    return found


def _missing(paths: Sequence[Path]) -> StoreCorrupt:
    """The error of a segment that is in none of its places."""
    for path in paths:
        if path.with_suffix(_REMOVED).exists():
            return TokensRemoved(
                f"Reading {path}: run.keep_trajectories removed these tokens; rewards, accounts "
                "and digests are kept."
            )
    return StoreCorrupt(
        f"Reading {paths[0]}: the segment is not there; restore the file from a copy. The rollouts "
        "of other segments can be read."
    )


# --- Writing --------------------------------------------------------------------------------------


class SegmentWriter:
    """Appends rows to the segments in a folder. Segments are made as they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: _OpenSegment | None = None

    def append(self, rollouts: Iterable[bytes]) -> list[bytes]:
        """Writes the rows of each rollout, and returns what the index keeps for them: their place,
        or the rows themselves if these are no longer than a place. Raises `StoreFailed` with the
        remedy.
        """
        kept: list[bytes] = []
        for rows in rollouts:
            if len(rows) <= _PLACE.size:
                kept.append(rows)
            else:
                kept.append(self._segment().append(rows).encode())
        if self._open is not None:
            self._open.write()
        return kept

    def _segment(self) -> "_OpenSegment":
        """The segment that is appended to. It is not full."""
        if self._open is not None and self._open.end >= SEGMENT_BYTES:
            self._open.write()
            self.sync()
            self.close()
        if self._open is None:
            self._open = _begun(self._folder)
        return self._open

    def settle(self) -> None:
        """The transaction of what was appended is over."""
        if self._open is not None:
            self._open.settled = self._open.end

    def sync(self) -> None:
        """Brings what was appended onto the disk itself, so that a power cut cannot take it."""
        if self._open is not None:
            self._open.sync()

    def undo(self) -> None:
        """Takes back what was appended since the last `settle`, for its transaction has failed."""
        if self._open is not None:
            self._open.undo()

    def remove_old(
        self,
        *,
        needed: Collection[int],
        max_bytes: int | None = None,
        max_seconds: float | None = None,
    ) -> int:
        """Removes the oldest segments, until at most `max_bytes` are left and none was last written
        to more than `max_seconds` ago. Returns the number of bytes that are free now.

        `needed` has the names of those that stay in any case. A removed segment leaves an empty
        file of another suffix, so that a reader can tell it from one that is lost.
        """
        stay = {f"{name:016x}" for name in needed}
        if self._open is not None:
            stay.add(self._open.path.stem)
        there: list[tuple[float, int, Path]] = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            state = path.stat()
            there.append((state.st_mtime, state.st_size, path))
        there.sort()
        left = sum(size for _, size, _ in there)
        freed = 0
        for written, size, path in there:
            is_old = max_seconds is not None and time.time() - written > max_seconds
            is_much = max_bytes is not None and left - freed > max_bytes
            if (is_old or is_much) and path.stem not in stay:
                try:
                    path.with_suffix(_REMOVED).touch()
                    path.unlink()
                except OSError as error:
                    _log.warning("%s was not removed: %s", path, error.strerror)
                else:
                    freed += size
        return freed

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class _OpenSegment:
    """A segment that this process appends to."""

    def __init__(self, name: int, path: Path, handle: int) -> None:
        self._name = name
        self.path = path
        self._handle = handle
        self._synced = 0
        self._gathered: list[bytes] = []
        """Rows that are not in the file yet. They end at `end`."""
        self._written = 0
        self.settled = 0
        self.end = 0

    def append(self, rows: bytes) -> SegmentPlace:
        """The place of these rows. They are in the file after `write`."""
        place = SegmentPlace(self._name, self.end, len(rows), zlib.crc32(rows))
        self._gathered.append(rows)
        self.end += len(rows)
        if self.end - self._written >= GATHERED_BYTES:
            self.write()
        return place

    def write(self) -> None:
        left = memoryview(b"".join(self._gathered))
        self._gathered.clear()
        with naming(self.path):
            while left:
                num = os.pwrite(self._handle, left, self._written)
                self._written += num
                left = left[num:]

    def sync(self) -> None:
        if self._synced < self.end:
            with naming(self.path):
                os.fsync(self._handle)
            self._synced = self.end

    def undo(self) -> None:
        self._gathered.clear()
        self.end = self.settled
        self._written = self.settled
        with suppress(OSError):  # what is left is overwritten, or lies behind every place
            os.ftruncate(self._handle, self.end)

    def close(self) -> None:
        os.close(self._handle)


def _begun(folder: Path) -> _OpenSegment:
    name = secrets.randbits(64)
    path = folder / f"{name:016x}{_SUFFIX}"
    with naming(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    sync(folder)
    return _OpenSegment(name, path, handle)
