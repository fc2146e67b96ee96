"""Which process holds a run's folder, by the file `lock` in it. `run.launcher.folder` writes it."""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

LOCK = "lock"


class Holder(msgspec.Struct, frozen=True):
    """A process, told apart from a later one of the same number by the instant of its start."""

    pid: int
    started: str
    """As the system counts it; empty where it does not tell."""
    since: str
    command: str

    @property
    def lives(self) -> bool:
        return self.started == start_of(self.pid) if self.started else _exists(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}), since {self.since}"


def holder_of(folder: Path) -> Holder | None:
    """What the lock says: also of a process that has died without giving the folder back. None
    without a lock that can be read.
    """
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / LOCK).read_bytes(), type=Holder)
    return None


def start_of(pid: int) -> str:
    """When the process started, in ticks since the system did; empty for none, or where /proc is
    not there.

    Empty too for one that has ended and waits for its parent to hear of it.
    """
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return others[18] if state not in "ZX" else ""
    except (OSError, ValueError, IndexError):
        return ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
