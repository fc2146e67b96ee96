"""Replaces files as a whole, so that no reader finds half of one."""

import os
from pathlib import Path

from midflight.errors import naming_file


def write_whole(path: Path, data: bytes) -> None:
    """Replaces the file in one step, with its bytes on disk first; makes the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.new")
    with naming_file(path), building.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    building.replace(path)
