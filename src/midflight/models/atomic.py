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
"""Whoever writes into a folder that is being made has this file in it locked."""


@contextmanager
def atomic_folder(dest: Path) -> Generator[tuple[Path, int]]:
    """A folder to write into, which becomes `dest` at the end of the block; `dest` is empty or not
    there. Torch-free.

    It lies beside `dest`, and is removed when the block fails. A killed process cannot remove its
    own: whoever makes `dest` next does. Beside the folder comes the descriptor of its lock, for a
    process that writes there and may outlive this one.

    `ConfigError` says so when there is no room or no permission.
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
    """A new folder, locked. Until the lock is held it looks abandoned, so that another process may
    remove it; then there is a next one.
    """
    while True:
        building = Path(tempfile.mkdtemp(prefix=_prefix(dest), dir=dest.parent))
        lock = os.open(building / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (building / LOCK).is_file():
            return building, lock
        os.close(lock)


def check_room(dest: Path, num_bytes: int) -> None:
    """`ConfigError` unless the disk that `dest` will lie on has as many bytes free."""
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
    """Removes what killed processes left. A folder that somebody still writes into is locked."""
    for lock in dest.parent.glob(f"{glob.escape(_prefix(dest))}*/{LOCK}"):
        with lock.open("r+") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _unwritable(dest: Path, error: OSError) -> ConfigError:
    remedy = (
        "free some space, or choose another place"
        if disk_full(error)
        else "see that it can be written to, or choose another place"
    )
    return ConfigError(f"making {str(dest)!r}: {error.strerror or error}; {remedy}.")
