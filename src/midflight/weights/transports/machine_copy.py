"""One copy of a version for all engines of a machine: a file in memory. The process that locks it
first fetches into it, and the others map the verified file.

A lock, and not a process id, shows which process uses the file, because a lock ends with its
process. So if a fetch was killed, the next process goes on with the part that is there. The last
user of a file removes it, or `memory_files.remove_stale` does.
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
from midflight.weights.transports.memory_files import SUFFIX

PREFIX = "midflight-pull"
LOOK_SECONDS = 0.02
"""The time between two tries for a lock: the kernel has no lock with a deadline."""


class MachineCopy:
    """A version's bytes, and behind them its tree as JSON, once the tree is known."""

    def __init__(
        self, file: int, num_bytes: int, *, path: Path | None = None, is_alone: bool = True
    ) -> None:
        self._file = file
        self._path = path
        self._num_bytes = num_bytes
        self._tree_at = aligned(max(1, num_bytes), mmap.PAGESIZE)
        self.is_alone = is_alone
        """True if no other process uses the file. Then its contents may be anything, and it may be
        written to. Otherwise another process has found it whole.
        """
        # Otherwise a full memory would kill the process at the first write.
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
        """Waits for another process that fetches the same, `patience` seconds at most. After that
        this process gets a copy of its own.

        The file's name says which run's version it is, and does not tell the secret.
        """
        name = hashlib.blake2b(f"{location} {fingerprint}".encode(), digest_size=12).hexdigest()
        failed: OSError | None = None
        for folder in places:
            path = folder / f"{PREFIX}-{name}{SUFFIX}"
            try:
                found = _locked(path, time.monotonic() + patience)
                if found is None:
                    return cls(os.memfd_create(PREFIX), num_bytes)
                file, is_alone = found
                return cls._opened(path, file, is_alone, num_bytes)
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
        """The tree as it was kept. It is empty in a new file."""
        size = os.fstat(self._file).st_size - self._tree_at
        if size <= 0:
            return b""
        return os.pread(self._file, size, self._tree_at)

    def keep_tree(self, tree: bytes) -> None:
        os.ftruncate(self._file, self._tree_at)
        os.pwrite(self._file, tree, self._tree_at)

    def shared(self) -> mmap.mmap:
        """A mapping to fetch into and to give away from. All processes see every write to it."""
        return mmap.mmap(self._file, self._tree_at)

    def own(self) -> memoryview:
        """The same pages for a caller that may write. Each page that the caller changes becomes its
        own.
        """
        mapped = mmap.mmap(self._file, self._tree_at, access=mmap.ACCESS_COPY)
        return memoryview(mapped)[: max(1, self._num_bytes)]

    def whole(self) -> None:
        """Marks the file as whole: no process writes to it any more, so others may use it too."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Removes the file if no other process uses it. Mappings live on. Idempotent."""
        file = self._file
        self._file = -1
        if file < 0:
            return
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path is not None:
                self._path.unlink()
        os.close(file)


def _locked(path: Path, until: float) -> tuple[int, bool] | None:
    """The open file, and True if it is locked for this caller alone. `None` if that
    takes too long.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        lock = _lock(file)
        status = os.fstat(file)
        # A file without a link was just removed by its last user.
        if lock is not None and status.st_nlink and status.st_uid == os.getuid():
            return file, lock == fcntl.LOCK_EX
        os.close(file)
        if time.monotonic() > until:
            return None
        time.sleep(LOOK_SECONDS)


def _lock(file: int) -> int | None:
    """The lock that the file could be given, alone if possible. `None` if the file has another
    lock.
    """
    for lock in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        with suppress(BlockingIOError):
            fcntl.flock(file, lock | fcntl.LOCK_NB)
            return lock
    return None
