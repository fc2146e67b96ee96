"""Puts back a run that a killed `--overwrite` left aside, before a command looks at its folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

from midflight.archive.runs import MAX_DEPTH, is_run
from midflight.run.launcher.folder_lock import restore
from midflight.run.launcher.replaced_files import is_left


def put_back_at(*paths: Path, resume: bool = False) -> None:
    """Puts back the replaced run for every path that is the folder of a run, or is in one. A line
    on standard error names the run that was put back. It also says that `resume` goes on with that
    one, because the new run had made no step to go on from.
    """
    folders: set[Path] = set()
    for path in paths:
        folders.update(place for place in (path, *path.parents) if is_left(place))
    for folder in sorted(folders):
        if restore(folder, _say) and resume:
            _say(f"{folder}: --resume goes on with it.")


def put_back_below(*folders: Path) -> None:
    """Does so for every run at or below the folders."""
    found: list[Path] = []
    for folder in folders:
        found += _left_below(folder, MAX_DEPTH)
    put_back_at(*found)


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
