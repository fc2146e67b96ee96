"""The lock on a run's folder, which one process holds at a time.

It is a lock of the system on the file `lock`. The parts that write into the folder inherit it, so
it ends with the last of them, however they die. The text in the file is for people, and for the
process that comes after a crash.
"""

import fcntl
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import msgspec

from midflight.archive.holder import LOCK, LockHolder, holder_of, start_of
from midflight.errors import ConfigError
from midflight.run.launcher import replaced_files
from midflight.run.launcher.folder import FAILED_LOGS, put_back, replaces, unwritable
from midflight.run.launcher.permissions import close_folder, files_for

ENDING_SECONDS = 60.0
"""The seconds that the parts of a killed launcher may take to end. They end by themselves in a few
seconds, or their guards kill them; on a busy machine both come late. A part that still runs after
that is named.
"""


def check_free(folder: Path) -> None:
    """Raises `ConfigError` if another living process holds it."""
    holder = holder_of(folder)
    if holder is not None and holder.lives and holder.pid != os.getpid():
        raise _in_use(folder, str(holder))


@contextmanager
def hold_folder(folder: Path, say: Callable[[str], None], *, group: str = "") -> Generator[FileIO]:
    """Makes the folder and holds it. Yields the lock, for the processes that write there too. Only
    this user may enter it, and those of the group, if there is one.

    Raises `ConfigError` with the present holder if there is one. The folder of a killed process is
    taken over, and `say` reports that. A run that was set aside is put back, or deleted, at the
    beginning and at the end.
    """
    is_new = not folder.exists()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files_for(group):
            folder.mkdir(exist_ok=True)
            lock = _locked(folder / LOCK)
    except OSError as error:
        raise unwritable(folder, error) from error
    with files_for(group):
        yield from _held(folder, lock, say, group=group, is_new=is_new)


def _held(
    folder: Path, lock: FileIO, say: Callable[[str], None], *, group: str, is_new: bool
) -> Generator[FileIO]:
    try:
        check_free(folder)
        left = holder_of(folder)
        if left is not None:
            say(f"{folder} is taken over from {left}, which ended without giving it back.")
        holder = LockHolder(
            os.getpid(),
            start_of(os.getpid()),
            time.strftime("%Y-%m-%d %H:%M:%S"),
            " ".join(["midflight", *sys.argv[1:3]]),
        )
        lock.truncate(0)
        lock.write(msgspec.json.encode(holder))
        with _clear_words(folder):
            _settle(folder, say)
        _delete_gone(folder, say)
        close_folder(folder, group, say)
        yield lock
    finally:
        holder = holder_of(folder)
        if holder is not None and holder.pid == os.getpid():
            _give_back(folder, lock)
        lock.close()
        restore(folder, say)
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # where nothing was written


def _give_back(folder: Path, lock: FileIO) -> None:
    """Removes the lock. It stays, without a holder's name, if a run was set aside, because
    `restore` waits by it for the last parts.
    """
    if replaced_files.is_left(folder):
        lock.truncate(0)
    else:
        _unlink(folder / LOCK, lock)


def restore(folder: Path, say: Callable[[str], None]) -> bool:
    """Puts back a run that was set aside, unless another process is making one in its place.
    Returns True if it did. If it cannot, `say` gets the reason.

    Waits for the last parts of a launcher that is gone, at most `ENDING_SECONDS`.
    """
    if not replaced_files.is_left(folder):
        return False
    holder = holder_of(folder)
    if holder is not None and holder.lives:
        return False
    try:
        lock = _locked(folder / LOCK)
        with lock, _clear_words(folder):
            is_back = _settle(folder, say)
            _delete_gone(folder, say)
            _unlink(folder / LOCK, lock)
    except (OSError, ConfigError) as error:
        if replaced_files.is_left(folder):  # else another process was faster
            say(
                f"{folder} holds a run that --overwrite set aside; it is not back yet: {error} The "
                "next start tries again."
            )
        return False
    return is_back


def _settle(folder: Path, say: Callable[[str], None]) -> bool:
    """Gives up a run that was set aside, or puts it back. Returns whether it was put back."""
    if not replaced_files.is_left(folder):
        return False
    if replaced_files.is_aside(folder) and replaces(folder):
        replaced_files.let_go(folder)
        return False
    put_back(folder)
    logs = folder / FAILED_LOGS
    printed = f"; what the new one's parts printed is in {logs}" if logs.is_dir() else ""
    say(
        f"{folder}: the run that --overwrite had set aside is back, for the new one ended before "
        f"its first step{printed}."
    )
    return True


@contextmanager
def _clear_words(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(folder, error) from error


def _delete_gone(folder: Path, say: Callable[[str], None]) -> None:
    try:
        replaced_files.delete_gone(folder)
    except OSError as error:
        say(
            f"{folder}: {error.filename}, of a run that was replaced, could not be deleted: "
            f"{error.strerror}. The next start tries again."
        )


def _locked(path: Path) -> FileIO:
    """Takes the lock. Waits for the last parts of a launcher that is gone, at most
    `ENDING_SECONDS`. Refuses at once if a living process holds it.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        lock = FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(path, lock):
                return lock
            lock.close()  # the one before removed it in the meantime
        except BlockingIOError:
            lock.close()
            holder = holder_of(path.parent)
            if holder is not None and holder.lives:
                raise _in_use(path.parent, str(holder)) from None
            if time.monotonic() > deadline:
                whom = f"what {holder or 'a process'} left behind when it ended: {_users(path)}"
                raise _in_use(path.parent, whom) from None
            time.sleep(0.05)


def _in_use(folder: Path, whom: str) -> ConfigError:
    return ConfigError(
        f"{folder} is in use by {whom}; wait for its end, stop it, or give --folder (--set "
        "run.folder=) for another place."
    )


def _unlink(path: Path, lock: FileIO) -> None:
    if _is_file(path, lock):
        path.unlink(missing_ok=True)


def _is_file(path: Path, file: FileIO) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _users(path: Path) -> str:
    """Numbers of the processes that have the file open."""
    found: set[str] = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.samefile(path):
                found.add(link.parts[2])
    return f"process {', '.join(sorted(found, key=int)) or 'unknown'}"
