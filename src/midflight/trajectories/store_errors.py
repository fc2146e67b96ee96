"""The store's files and their disk: errors that name the file and the remedy, and waits for the
disk itself.
"""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from midflight.errors import StoreCorrupt, StoreFailed, disk_full

_NO_ROOM = "free some space and resume the run"
_NO_ACCESS = "check the disk and the folder's permissions"


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Turns errors of SQLite and the disk into errors that name the file and the remedy."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StoreCorrupt(
                f"Reading {path}: {error}; restore the file from a copy, or start a new run folder."
            ) from error
        remedy = _NO_ROOM if code == sqlite3.SQLITE_FULL else _NO_ACCESS
        raise StoreFailed(f"Writing {path}: {error}; {remedy}.") from error
    except OSError as error:
        full = disk_full(error) is not None
        raise StoreFailed(
            f"{'Writing' if full else 'Opening'} {path}: {error.strerror or error}; "
            f"{_NO_ROOM if full else _NO_ACCESS}."
        ) from error


def sync(path: Path) -> None:
    """Waits until what was written to a file, or changed in a folder, is on the disk itself."""
    with naming(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
