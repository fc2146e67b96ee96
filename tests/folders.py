"""Folders as values, to be compared."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def tree_of(folder: Path) -> dict[str, object]:
    """Every file with the hash of its bytes and its mode, every folder with its mode, every link with where it leads."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_dir():
            found[name] = path.stat().st_mode
        else:
            found[name] = (path.stat().st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
    return found


def mode_of(path: Path) -> int:
    """Who may do what with it."""
    return path.stat().st_mode & 0o777


@contextmanager
def umask(mask: int) -> Generator[None]:
    """What this process makes within has no permissions of the mask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
