"""What a killed publisher leaves in shared memory, and its removal. Without torch, so that a launcher can do it."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from pathlib import Path

SHARED = Path("/dev/shm")
SUFFIX = ".weights"


def remove_stale(name: str, *, folder: Path | None = None) -> list[Path]:
    """Removes files that dead publishers left under this name, and returns them. Files of living ones are locked and stay."""
    removed: list[Path] = []
    for place in [folder] if folder is not None else [SHARED, Path(tempfile.gettempdir())]:
        for path in sorted(place.glob(f"{name}-*{SUFFIX}")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
    return removed
