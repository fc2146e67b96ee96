"""Files of shared memory: the folders in which they lie, how one is reserved, and how those that
dead processes left are removed. Importing this needs no torch.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from midflight.errors import ConfigError

SHARED = Path("/dev/shm")
SUFFIX = ".weights"


def shared_places() -> list[Path]:
    """The folders for files that any process of this machine may leave, the best first."""
    return [SHARED, Path(tempfile.gettempdir())]


def shared_free() -> int:
    """The bytes that are free under /dev/shm."""
    return shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0


def reserve(
    name: str, num_bytes: int, *, folder: Path | None = None, spare: int = 0
) -> tuple[Path, int]:
    """Makes a locked file with all its memory set aside, under /dev/shm if it has room for that and
    for `spare` bytes more, otherwise in the folder. Returns its path and descriptor.

    Without the reservation a full /dev/shm would kill the process at the first write (SIGBUS).
    """
    try:
        return _create(SHARED, name, num_bytes, spare=spare)
    except OSError as error:
        problem = str(error)
    remedy = "enlarge /dev/shm (containers: --shm-size)"
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _create(folder.absolute(), name, num_bytes)
        except OSError as error:
            remedy = f"{remedy}, or make room in {folder} ({error})"
    raise ConfigError(
        f"publishing weights: no room for {num_bytes} bytes of shared memory ({problem}); {remedy}."
    )


def _create(folder: Path, name: str, num_bytes: int, *, spare: int = 0) -> tuple[Path, int]:
    file, path = tempfile.mkstemp(prefix=f"{name}-{os.getpid()}-", suffix=SUFFIX, dir=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(file, 0, num_bytes)
        if os.fstat(file).st_nlink == 0:
            raise BlockingIOError(f"{path} was removed as stale before it was locked")
        if spare and shutil.disk_usage(folder).free < spare:
            raise OSError(errno.ENOSPC, f"{spare} bytes must stay free in {folder}")
    except OSError:
        os.close(file)
        Path(path).unlink(missing_ok=True)
        raise
    return Path(path), file


def remove_stale(name: str, places: Sequence[Path]) -> list[Path]:
    """Removes files that dead processes left under this name, and returns them. Files of living
    ones are locked and stay.
    """
    removed: list[Path] = []
    for place in places:
        for path in sorted(place.glob(f"{name}-*{SUFFIX}")):
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
    return removed
