"""What a run keeps in memory and in temporary folders, and the removal of what killed runs left
there: it has no lock any more.

A lock and not a process id says whether something is in use: it ends with its process, and holds
between containers too.
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

from midflight.weights.transports.files import SHARED, remove_stale

PREFIX = "midflight"
"""Begins every name of ours in folders that we share with other programs."""
_SUFFIX = ".scratch"


def segment_name(folder: Path) -> str:
    """Begins the names of a run's files and folders there: the same after a crash, and no other
    run's.
    """
    return f"{PREFIX}-{hashlib.blake2b(str(folder.resolve()).encode(), digest_size=6).hexdigest()}"


@contextmanager
def scratch_folder(name: str = PREFIX) -> Generator[Path]:
    """An empty folder whose name begins with `name`, in memory where there is a place for it.

    Nobody removes it while this process lives; its end does, or the next run of anyone.
    """
    try:
        folder, lock = _locked_folder(SHARED, name)
    except OSError:
        folder, lock = _locked_folder(Path(tempfile.gettempdir()), name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left() -> None:
    """Removes what dead processes left, whichever run they were of. What is locked is in use; what
    is another user's stays.
    """
    remove_stale(PREFIX)
    for place in {SHARED, Path(tempfile.gettempdir())}:
        for folder in place.glob(f"{PREFIX}-*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked_folder(place: Path, name: str) -> tuple[Path, int]:
    """A new folder and its lock. Somebody's `remove_left` may take it in the instant before it is
    locked: then another is made.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", suffix=_SUFFIX, dir=place))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: Path) -> int:
    """Holds until the descriptor is closed or this process ends; `BlockingIOError` if another has
    it. Children do not inherit it.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
