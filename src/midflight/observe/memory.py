"""Peak memory of a run: proportional set sizes of a process and all its descendants, so that shared
pages count once.

Linux only; where /proc is missing the peak is that of the kernel's own accounting, which counts
shared pages in each process.
"""

import resource
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")
GROWN = 1.01
"""A peak that is missed by so little is none."""
QUIET = 60
"""Samples without growth after which the kernel is asked all the same: fewer pages may be shared
than were.
"""


class PeakMemory:
    """Call `sample` every so often; the peak between two samples is missed.

    The kernel walks all pages of a process for its proportional size: 30 ms a gigabyte, in which
    the process gets no new ones. So it is asked only when the resident size, which costs nothing,
    has grown since it was asked last, and once in `QUIET` samples.
    """

    def __init__(
        self, pid: int, *, elsewhere: Callable[[], int] = lambda: 0, proc: Path = PROC
    ) -> None:
        """`elsewhere`: bytes of what belongs to it and is not below `pid` here, but on other
        machines for instance.
        """
        self._pid = pid
        self._elsewhere = elsewhere
        self._proc = proc
        self._peak = self._found = 0
        self._resident = 0
        """The largest at which the kernel was asked."""
        self._num_quiet = 0

    def sample(self) -> float:
        """Megabytes (2**20 bytes) of the process tree when it was asked last, which is now if there
        may be a new peak.
        """
        if self._may_be_peak():
            self._found = (
                tree_bytes(self._pid, proc=self._proc)
                if self._proc.is_dir()
                else _accounted_bytes()
            )
        now = self._found + self._elsewhere()
        self._peak = max(self._peak, now)
        return now / 2**20

    @property
    def peak_mb(self) -> float:
        return self._peak / 2**20

    def _may_be_peak(self) -> bool:
        resident = (
            sum(
                resident_bytes(member, proc=self._proc)
                for member in descendants(self._pid, proc=self._proc)
            )
            if self._proc.is_dir()
            else 0
        )
        self._num_quiet += 1
        if 0 < resident <= GROWN * self._resident and self._num_quiet < QUIET:
            return False
        self._resident = max(self._resident, resident)
        self._num_quiet = 0
        return True


def tree_bytes(pid: int, *, proc: Path = PROC) -> int:
    """Bytes of a process and its descendants."""
    return sum(process_bytes(member, proc=proc) for member in descendants(pid, proc=proc))


def descendants(pid: int, *, proc: Path = PROC) -> list[int]:
    """The process and all below it, as they are at this moment."""
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        parent = _parent(folder) if folder.name.isdigit() else None
        if parent is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for member in found:  # grows while it is walked
        found.extend(children.get(member, []))
    return found


def process_bytes(pid: int, *, proc: Path = PROC) -> int:
    """PSS of one process, its RSS where the kernel doesn't give PSS, 0 when it is gone."""
    for name, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = (proc / str(pid) / name).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def resident_bytes(pid: int, *, proc: Path = PROC) -> int:
    """Pages that a process has in memory, also those that others have too; 0 when it is gone."""
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def resident(pid: int, *, proc: Path = PROC) -> dict[tuple[str, str], int]:
    """Resident bytes of a launcher and of its children, by kind and pid. Cheap: shared pages count
    in each, and nothing is walked.

    The kind is the word after the module of a child's command line, such as `trainer`; empty where
    /proc is not there.
    """
    try:
        children = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
        kinds = {
            child: _kind((proc / child / "cmdline").read_bytes().split(b"\0")) for child in children
        } | {str(pid): "launcher"}
        sizes = {
            child: int((proc / child / "statm").read_text().split()[1]) * resource.getpagesize()
            for child in kinds
        }
    except (OSError, IndexError):  # one of them ended meanwhile
        return {}
    return {(kind, child): sizes[child] for child, kind in kinds.items() if kind}


def _kind(command: list[bytes]) -> str:
    """Empty where it is none of a run's processes."""
    if b"midflight.run.launcher.child" in command[:-1]:
        return command[command.index(b"midflight.run.launcher.child") + 1].decode()
    return "trackers" if b"midflight.trackers.process" in command else ""


def _parent(folder: Path) -> int | None:
    try:
        text = (folder / "stat").read_text()
    except OSError:
        return None
    # The command's name, in brackets, may itself hold brackets and spaces: the fields start after
    # the last one.
    return int(text.rpartition(")")[2].split()[1])


def _accounted_bytes() -> int:
    here = resource.getrusage(resource.RUSAGE_SELF)
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (here.ru_maxrss + below.ru_maxrss) * 1024
