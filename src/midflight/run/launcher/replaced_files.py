"""Sets a run aside that another one replaces, and puts it back unless the other makes its first
step.

Everything is done by renames within one file system. After a crash at any instant, the name of the
folder that is left says how to go on:

| in the run's folder | what it holds | how to go on |
|---|---|---|
| `.overwritten-moving` | a part of the run; the rest is in its place | the part is moved back |
| `.overwritten` | the whole run; the files in its place are the new run's | the new run's is moved away, then the whole run back |
| `.overwritten-gone`, `.overwritten-gone1`, ... | a run that is no longer needed | it is deleted |

The functions are synchronous and hold no lock, because their caller holds the folder. They may be
called again after a crash in their midst.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec

from midflight.errors import ConfigError
from midflight.observe.atomic_write import write_whole

MOVING = ".overwritten-moving"
ASIDE = ".overwritten"
GONE = ".overwritten-gone"
PLACES = "places.json"


class ReplacedFiles(msgspec.Struct, frozen=True):
    """A folder from which files and folders of a run are set aside."""

    root: str
    """Absolute, or relative to the run's folder: then the run's folder may be moved meanwhile."""
    aside: str | None
    """The folder that they are moved to, on the same file system. None stands for the folder whose
    name says how far the renames have come.
    """
    names: tuple[str, ...]
    """The files that a run may have there, in the order in which they are moved. They are moved
    back in the opposite order.
    """


def is_left(folder: Path) -> bool:
    """True if a run was set aside there, wholly or in part."""
    return (folder / ASIDE).is_dir() or (folder / MOVING).is_dir()


def is_aside(folder: Path) -> bool:
    """True if a whole run was set aside there. The files in its place are then a new run's."""
    return (folder / ASIDE).is_dir()


def check_movable(folder: Path, places: Sequence[ReplacedFiles]) -> None:
    """Raises `ConfigError` if something could not be renamed. It only reads."""
    for place in places:
        root = folder / place.root
        found = [root / name for name in place.names if os.path.lexists(root / name)]
        if found and not os.access(root, os.W_OK | os.X_OK):
            raise ConfigError(
                f"setting aside the run in {folder}: {root} cannot be written to; make it "
                "writable, or give --folder for another place."
            )
        for path in found:
            _check_entry(folder, path)


def _check_entry(folder: Path, path: Path) -> None:
    if path.is_dir() and path.is_symlink():
        raise ConfigError(
            f"setting aside the run in {folder}: {path} is a link to the folder {path.resolve()}, "
            "whose content would stay; remove the link, or give --folder for another place."
        )
    if path.stat(follow_symlinks=False).st_dev != path.parent.stat().st_dev or path.is_mount():
        raise ConfigError(
            f"setting aside the run in {folder}: {path} is a file system of its own, which cannot "
            "be renamed; unmount it, or give --folder for another place."
        )
    if path.is_dir() and not os.access(path, os.W_OK):
        raise ConfigError(
            f"setting aside the run in {folder}: {path} cannot be written to; make it writable, or "
            "give --folder for another place."
        )


def set_aside(folder: Path, places: Sequence[ReplacedFiles]) -> None:
    """Moves the files that the places name. Raises `OSError` if something cannot be moved: then
    everything is back in its place.
    """
    assert not is_left(folder), f"{folder} has a run aside already"
    moving = folder / MOVING
    moving.mkdir()
    try:
        write_whole(moving / PLACES, msgspec.json.encode(list(places)))
        _sync(moving)
        _sync(folder)
        for place in places:
            _move_out(folder, place)
        moving.rename(folder / ASIDE)
        _sync(folder)
    except OSError:
        put_back(folder)
        raise


def _move_out(folder: Path, place: ReplacedFiles) -> None:
    root = folder / place.root
    aside = _aside_of(folder, place)
    aside.mkdir(exist_ok=True)
    for name in place.names:
        if os.path.lexists(root / name):
            (root / name).rename(aside / name)
    _sync(aside)
    _sync(root)


def put_back(folder: Path) -> None:
    """Moves the run back that was set aside. The files that a new run has made in its place are
    moved away first, and `delete_gone` deletes them.
    """
    if is_aside(folder):
        places = _places_in(folder / ASIDE)
        gone = _new_gone(folder)
        for place in places:
            _move_away(folder, place, gone)
        (folder / ASIDE).rename(folder / MOVING)
        _sync(folder)
    moving = folder / MOVING
    if not moving.is_dir():
        return
    if (moving / PLACES).is_file():  # without the list nothing was moved yet
        for place in reversed(_places_in(moving)):
            _move_back(folder, place)
    (moving / PLACES).unlink(missing_ok=True)
    (moving / f".{PLACES}.new").unlink(missing_ok=True)  # a crash left it half written
    moving.rmdir()
    _sync(folder)


def _move_away(folder: Path, place: ReplacedFiles, gone: Path) -> None:
    """Moves away the files that a new run has made in a place. Files on another file system are
    deleted at once.
    """
    root = folder / place.root
    for name in place.names:
        if not os.path.lexists(root / name):
            continue
        if place.aside is None:
            (root / name).rename(gone / name)
        else:
            _delete(root / name)
    if root.is_dir():
        _sync(root)


def _move_back(folder: Path, place: ReplacedFiles) -> None:
    """Moves the old run's files of a place back. Each name is either set aside or in its place. A
    file that is found in both was written by another program meanwhile, and is deleted from the
    place.
    """
    root = folder / place.root
    aside = _aside_of(folder, place)
    for name in reversed(place.names):
        if not os.path.lexists(aside / name):
            continue
        if os.path.lexists(root / name):
            _delete(root / name)
        (aside / name).rename(root / name)
    if root.is_dir():
        _sync(root)
    if place.aside is not None:
        with suppress(FileNotFoundError):
            aside.rmdir()


def let_go(folder: Path) -> None:
    """Gives up the run that was set aside, in one rename. `delete_gone` deletes it."""
    (folder / ASIDE).rename(_new_gone(folder) / ASIDE)
    _sync(folder)


def delete_gone(folder: Path) -> None:
    """Deletes the runs that are no longer needed, which may take long. Raises `OSError` if that is
    not possible.
    """
    for gone in folder.glob(f"{GONE}*"):
        run = gone / ASIDE
        places = _places_in(run) if (run / PLACES).is_file() else []
        for place in places:
            if place.aside is not None and (folder / place.aside).is_dir():
                shutil.rmtree(folder / place.aside)
        shutil.rmtree(gone)


def _new_gone(folder: Path) -> Path:
    names = (f"{GONE}{number or ''}" for number in count())
    gone = next(folder / name for name in names if not (folder / name).exists())
    gone.mkdir()
    return gone


def _aside_of(folder: Path, place: ReplacedFiles) -> Path:
    return folder / (MOVING if place.aside is None else place.aside)


def _places_in(aside: Path) -> list[ReplacedFiles]:
    try:
        return msgspec.json.decode((aside / PLACES).read_bytes(), type=list[ReplacedFiles])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{aside} holds the run that --overwrite set aside, and its {PLACES} cannot be read "
            f"({error}); move what is in it back into {aside.parent} by hand, and remove it."
        ) from error


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Waits until renames in the folder are on its disk. Some file systems cannot do that for a
    folder.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
