"""A run that a killed `--overwrite` left aside is put back before a command looks at its folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

from midflight.archive.runs import MAX_DEPTH, is_run
from midflight.run.launcher.aside import is_left
from midflight.run.launcher.holding import restore


def put_back_at(*paths: Path, resume: bool = False) -> None:
    """For every path that is the folder of a run, or is in one. A word on standard error says what
    was put back, and that `resume` goes on with that: the new run had made no step that it could go
    on from."""
    folders = {place for path in paths for place in (path, *path.parents) if is_left(place)}
    for folder in sorted(folders):
        if restore(folder, _say) and resume:
            _say(f"{folder}: --resume goes on with it.")


def put_back_below(*folders: Path) -> None:
    """For every run at or below the folders."""
    put_back_at(*(found for folder in folders for found in _left_below(folder, MAX_DEPTH)))


def _left_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_left(folder):
        yield folder
    elif depth and folder.is_dir() and not is_run(folder):
        try:
            inner = [
                one
                for one in folder.iterdir()
                if one.is_dir() and not one.name.startswith(".") and not one.is_symlink()
            ]
        except (PermissionError, FileNotFoundError):
            return
        for one in inner:
            yield from _left_below(one, depth - 1)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
