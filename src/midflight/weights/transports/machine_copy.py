"""One copy of a version for all engines of a machine: a file in memory. Who locks it first fetches
into it; the others map what it verified.

A lock and not a process id says who uses it: it ends with its process. So a fetch that was killed
is gone on with by the next, from what is there, and a file that nobody uses any more is removed by
its last user, or by `files.remove_stale`.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from midflight.errors import WeightsCorrupt
from midflight.weights.manifest import aligned
from midflight.weights.transports.files import SUFFIX

PREFIX = "midflight-pull"
LOOK_SECONDS = 0.02
"""Between two tries for a lock: the kernel has none with a deadline."""


class MachineCopy:
    """A version's bytes, and behind them its tree as JSON, once that is known."""

    def __init__(
        self, file: int, num_bytes: int, *, path: Path | None = None, is_alone: bool = True
    ) -> None:
        self._file = file
        self._path = path
        self._num_bytes = num_bytes
        self._tree_at = aligned(max(1, num_bytes), mmap.PAGESIZE)
        self.is_alone = is_alone
        """Whether nobody else uses it: then there may be anything in it, and it may be written to.
        Else another has found it whole.
        """
        # else a full memory would kill the process at the first write
        os.posix_fallocate(file, 0, self._tree_at)

    @classmethod
    def of(
        cls,
        location: str,
        fingerprint: str,
        num_bytes: int,
        *,
        places: Sequence[Path],
        patience: float,
    ) -> MachineCopy:
        """Waits for another that fetches the same, `patience` seconds at most: then this one has a
        copy of its own.

        The name says which run's version it is, and does not tell the secret.
        """
        name = hashlib.blake2b(f"{location} {fingerprint}".encode(), digest_size=12).hexdigest()
        failed: OSError | None = None
        for folder in places:
            try:
                found = _locked(folder / f"{PREFIX}-{name}{SUFFIX}", time.monotonic() + patience)
                return (
                    cls(os.memfd_create(PREFIX), num_bytes)
                    if found is None
                    else cls._opened(*found, num_bytes)
                )
            except OSError as error:
                failed = failed or error
        raise WeightsCorrupt(
            f"fetching weights: no room for {num_bytes} bytes ({failed}); enlarge /dev/shm "
            "(containers: --shm-size)."
        )

    @classmethod
    def _opened(cls, path: Path, file: int, is_alone: bool, num_bytes: int) -> MachineCopy:
        try:
            return cls(file, num_bytes, path=path, is_alone=is_alone)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(file)
            raise

    def tree(self) -> bytes:
        """As it was kept; nothing in a new file."""
        size = os.fstat(self._file).st_size - self._tree_at
        return os.pread(self._file, size, self._tree_at) if size > 0 else b""

    def keep_tree(self, tree: bytes) -> None:
        os.ftruncate(self._file, self._tree_at)
        os.pwrite(self._file, tree, self._tree_at)

    def shared(self) -> mmap.mmap:
        """To fetch into, and to give away from: what is written is there for all."""
        return mmap.mmap(self._file, self._tree_at)

    def own(self) -> memoryview:
        """The same pages for a caller who may write: a page that it changes becomes its own."""
        return memoryview(mmap.mmap(self._file, self._tree_at, access=mmap.ACCESS_COPY))[
            : max(1, self._num_bytes)
        ]

    def whole(self) -> None:
        """Nobody writes to it any more: others may use it too."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Removes the file if nobody else uses it. Mappings live on. Idempotent."""
        file = self._file
        self._file = -1
        if file < 0:
            return
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path is not None:
                self._path.unlink()
        os.close(file)


def _locked(path: Path, until: float) -> tuple[Path, int, bool] | None:
    """The open file, and whether it is locked for this caller alone; `None` if that takes too
    long.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        lock = _lock(file)
        status = os.fstat(file)
        # else its last user has just removed it
        if lock is not None and status.st_nlink and status.st_uid == os.getuid():
            return path, file, lock == fcntl.LOCK_EX
        os.close(file)
        if time.monotonic() > until:
            return None
        time.sleep(LOOK_SECONDS)


def _lock(file: int) -> int | None:
    for lock in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        with suppress(BlockingIOError):
            fcntl.flock(file, lock | fcntl.LOCK_NB)
            return lock
    return None
