"""Tells which process holds a run's folder, from the file `lock` that
`run.launcher.folder_lock` writes.
"""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from midflight.observe.memory import stat_of

LOCK = "lock"


class LockHolder(msgspec.Struct, frozen=True):
    """A process. The instant of its start distinguishes it from a later process with the same
    number.
    """

    pid: int
    started: str
    """The time at which it started, as the system counts it, or an empty string if the system does
    not tell.
    """
    since: str
    command: str

    @property
    def lives(self) -> bool:
        return self.started == start_of(self.pid) if self.started else _exists(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}), since {self.since}"


def holder_of(folder: Path) -> LockHolder | None:
    """The process that the lock names, even if it has died without giving the folder back. None
    without a lock that can be read.
    """
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / LOCK).read_bytes(), type=LockHolder)
    return None


def start_of(pid: int) -> str:
    """Returns the time at which a process started, in ticks since the system started. It is empty
    if there is no such process or no /proc.

    It is empty too for a process that has ended and for which its parent has not waited yet.
    """
    fields = stat_of(pid)
    if not fields or fields[0] in "ZX":
        return ""
    return fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
