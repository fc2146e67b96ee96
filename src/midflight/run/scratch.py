"""Scratch folders. A run keeps them in memory or among temporary files, and removes those that
killed runs left there.

A lock, and not a process id, says whether a folder is in use: it ends with its process, and holds
between containers too. A folder that a killed run left is no longer locked.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from midflight.weights.transports.memory_files import remove_stale, shared_places

PREFIX = "midflight"
"""The beginning of all our names in folders that we share with other programs."""
_SUFFIX = ".scratch"


def segment_name(folder: Path) -> str:
    """The beginning of the names of a run's files and folders there. It is the same after a crash,
    and no other run has it.
    """
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=6).hexdigest()
    return f"{PREFIX}-{digest}"


@contextmanager
def scratch_folder(name: str = PREFIX) -> Generator[Path]:
    """Yields an empty folder whose name begins with `name`, in memory if there is a place for it.

    No other run removes it while this process lives. It is removed at the end of the block, or, if
    this process was killed, by the next run on this machine.
    """
    in_memory, among_files = shared_places()
    try:
        folder, lock = _locked_folder(in_memory, name)
    except OSError:
        folder, lock = _locked_folder(among_files, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left() -> None:
    """Removes the folders that dead processes of any run left. A locked folder is in use; a folder
    of another user stays.
    """
    remove_stale(PREFIX, shared_places())
    for place in set(shared_places()):
        for folder in place.glob(f"{PREFIX}-*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked_folder(place: Path, name: str) -> tuple[Path, int]:
    """A new folder and its lock. The `remove_left` of another run may take it in the instant before
    it is locked: then another is made.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", suffix=_SUFFIX, dir=place))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: Path) -> int:
    """Locks the folder until the descriptor is closed or this process ends; raises
    `BlockingIOError` if another process has the lock. Children do not inherit it.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
