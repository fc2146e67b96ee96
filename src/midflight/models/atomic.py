"""A folder that is there whole or not at all."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from midflight.errors import ConfigError, disk_full
from midflight.models.permissions import open_to_others

LOCK = ".lock"
"""A file in a folder that is being made. The process that writes into the folder holds its lock."""


@contextmanager
def atomic_folder(dest: Path) -> Generator[tuple[Path, int]]:
    """A folder to write into, which becomes `dest` at the end of the block; `dest` is empty or not
    there. Torch-free.

    It lies beside `dest`, and is removed when the block fails. A killed process cannot remove its
    folder: the next process that makes `dest` does. The descriptor of the folder's lock comes with
    it, for a process that writes there and may outlive this one.

    Raises `ConfigError` if there is no room or no permission.
    """
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(dest)
        building, lock = _begun(dest)
    except OSError as error:
        raise _unwritable(dest, error) from error
    try:
        yield building, lock
        (building / LOCK).unlink()
        open_to_others(building)
        building.rename(dest)
    except OSError as error:
        raise _unwritable(dest, error) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
        os.close(lock)


def _begun(dest: Path) -> tuple[Path, int]:
    """A new folder, locked. Until the lock is held it looks abandoned, so another process may
    remove it; then the next one is made.
    """
    while True:
        building = Path(tempfile.mkdtemp(prefix=_prefix(dest), dir=dest.parent))
        lock = os.open(building / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (building / LOCK).is_file():
            return building, lock
        os.close(lock)


def check_room(dest: Path, num_bytes: int) -> None:
    """Raises `ConfigError` unless the disk of `dest` has this many bytes free."""
    there = next(place for place in (dest.absolute(), *dest.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise ConfigError(
            f"making {str(dest)!r}: it takes {num_bytes / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB "
            "are free there; free some space, or choose another place."
        )


def _prefix(dest: Path) -> str:
    return f".{dest.name}.part-"


def _remove_abandoned(dest: Path) -> None:
    """Removes folders that killed processes left. A folder that a process still writes into is
    locked.
    """
    for lock in dest.parent.glob(f"{glob.escape(_prefix(dest))}*/{LOCK}"):
        with lock.open("r+") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _unwritable(dest: Path, error: OSError) -> ConfigError:
    remedy = "see that it can be written to, or choose another place"
    if disk_full(error):
        remedy = "free some space, or choose another place"
    return ConfigError(f"making {str(dest)!r}: {error.strerror or error}; {remedy}.")
