"""The permissions of a run's folder, which holds conversations and tokens.

Only this user may enter it, or also the group that `run.share_with_group` names. Every process of a
run makes its files so, because it inherits the mask of the launcher, or sets it itself on another
machine.
"""

import grp
import os
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from midflight.archive.holder import LOCK
from midflight.errors import ConfigError

PRIVATE = 0o077
SHARED = 0o027
"""What the masks take away: all that the group and others may, or what others may and the group's
right to write.
"""
_lock = threading.Lock()
_masks = list[int]()
"""The masks of the runs of this process that go on. A program may have several in threads."""
_usual = 0
"""The mask that the process has without a run."""


def mask_of(group: str) -> int:
    """The mask of a run that is shared with this group, or with none."""
    return SHARED if group else PRIVATE


def group_id(group: str) -> int:
    """The number of a group in which this user may put files. Raises `ConfigError` otherwise."""
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"run.share_with_group is {group!r}, which is no group of this machine; name one of "
            "`getent group`, or leave it out."
        ) from None
    if os.geteuid() != 0 and number not in (os.getegid(), *os.getgroups()):
        raise ConfigError(
            f"run.share_with_group is {group!r}, and you are not a member of it; name one of "
            "`id -Gn`, or have yourself added."
        )
    return number


@contextmanager
def files_for(group: str) -> Generator[None]:
    """Files that this process makes meanwhile, and its children, can be read by this user alone, or
    by a group too. In a notebook that holds for the notebook's own files as well. Of several runs
    in one process the one that lets in fewest decides.
    """
    global _usual
    mask = mask_of(group)
    with _lock:
        before = os.umask(max([mask, *_masks]))
        if not _masks:
            _usual = before
        _masks.append(mask)
    try:
        yield
    finally:
        with _lock:
            _masks.remove(mask)
            os.umask(max(_masks) if _masks else _usual)


def close_folder(folder: Path, group: str, say: Callable[[str], None]) -> None:
    """Takes from others what they may do in the folder, and gives a group what it may. `say` gets
    a sentence if others could enter it so far.
    """
    number = group_id(group) if group else None
    others_may = bool(stat.S_IMODE(folder.stat().st_mode) & 0o007)
    was_open = others_may and any(path.name != LOCK for path in folder.iterdir())
    there = folder.resolve()  # it may be a link
    try:
        for path in (there, *there.rglob("*")):
            _close(path, number)
    except OSError as error:
        say(
            f"note: who may read {folder} cannot be set ({error.strerror}: {error.filename}); its "
            "disk decides. Choose a run.folder on another disk if others must not read it."
        )
        return
    if was_open:
        whom = f"the group {group}" if group else "you alone"
        say(
            f"{folder} and what is in it could be read by every user of this machine; from now on "
            f"by {whom}."
        )


def close_store(store: Path) -> None:
    """Takes from others what they may do with a store that lies outside the run's folder."""
    for path in store.parent.glob(f"{store.name}*"):
        _close(path, None)


def _close(path: Path, number: int | None) -> None:
    """Sets one file's or folder's permissions. One that is gone by now needs none, and one of
    another user lies in a folder that is closed.
    """
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
            return
        mode = found.st_mode & 0o700
        if number is not None:
            if found.st_gid != number:
                os.chown(path, -1, number, follow_symlinks=False)
            mode |= mode >> 3 & 0o050
            if stat.S_ISDIR(found.st_mode):
                mode |= stat.S_ISGID
        if stat.S_IMODE(found.st_mode) != mode:
            path.chmod(mode)
    except FileNotFoundError:
        return
