"""The peak memory of a run: proportional set sizes of a process and all its descendants, so that
shared pages count once.

This works on Linux only. Without /proc, the peak comes from the kernel's own accounting, which
counts shared pages in each process.
"""

import resource
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")
GROWN = 1.01
"""A resident size that has grown by less than this factor does not count as a new peak."""
QUIET = 60
"""After this many samples without growth the kernel is asked all the same: fewer pages may be
shared than before.
"""


class PeakMemory:
    """The peak over all calls of `sample`; a peak between two calls is missed.

    To find the proportional size of a process, the kernel walks all its pages: 30 ms a gigabyte, in
    which the process gets no new pages. It is therefore asked only when the resident size, which
    costs nothing, has grown since it was asked last, and once in `QUIET` samples.
    """

    def __init__(
        self, pid: int, *, elsewhere: Callable[[], int] = lambda: 0, proc: Path = PROC
    ) -> None:
        """`elsewhere` gives the bytes of processes that belong to the run and are not descendants
        of `pid`, for instance because they run on other machines.
        """
        self._pid = pid
        self._elsewhere = elsewhere
        self._proc = proc
        self._peak = 0
        self._found = 0
        self._resident = 0
        """The largest resident size at which the kernel was asked."""
        self._num_quiet = 0

    def sample(self) -> float:
        """The size of the process tree in megabytes (2**20 bytes) when the kernel was asked last,
        which is now if there may be a new peak.
        """
        if self._may_be_peak():
            if self._proc.is_dir():
                self._found = tree_bytes(self._pid, proc=self._proc)
            else:
                self._found = _accounted_bytes()
        now = self._found + self._elsewhere()
        self._peak = max(self._peak, now)
        return now / 2**20

    @property
    def peak_mb(self) -> float:
        return self._peak / 2**20

    def _may_be_peak(self) -> bool:
        resident = 0
        if self._proc.is_dir():
            for member in descendants(self._pid, proc=self._proc):
                resident += resident_bytes(member, proc=self._proc)
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
    """The process and its descendants, as they are at this moment."""
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        fields = stat_of(int(folder.name), proc=proc) if folder.name.isdigit() else []
        if fields:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for member in found:  # grows while it is walked
        found.extend(children.get(member, []))
    return found


def stat_of(pid: int, *, proc: Path = PROC) -> list[str]:
    """The fields of /proc/PID/stat from the state on, or none if there is no such process."""
    try:
        # The command's name, in brackets, may itself hold brackets and spaces: the fields start
        # after the last one.
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_bytes(pid: int, *, proc: Path = PROC) -> int:
    """The PSS of one process, its RSS if the kernel doesn't give the PSS, 0 when it is gone."""
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
    """The bytes of a process that are in memory, including pages that it shares with others. 0 when
    it is gone.
    """
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def resident(pid: int, *, proc: Path = PROC) -> dict[tuple[str, str], int]:
    """Resident bytes of a launcher and of its children, by kind and pid. This is cheap: shared
    pages count in each process, and the kernel walks nothing.

    The kind is the word after the module of a child's command line, such as `trainer`. The result
    is empty if /proc is missing.
    """
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    try:
        children = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
        for child in children:
            command = (proc / child / "cmdline").read_bytes().split(b"\0")
            kinds[child] = _kind(command)
        kinds[str(pid)] = "launcher"
        for child in kinds:
            pages = int((proc / child / "statm").read_text().split()[1])
            sizes[child] = pages * resource.getpagesize()
    except (OSError, IndexError):  # one of them ended meanwhile
        return {}
    return {(kind, child): sizes[child] for child, kind in kinds.items() if kind}


def _kind(command: list[bytes]) -> str:
    """The kind of a process by its command line, or an empty string if it is no process of a
    run.
    """
    if b"midflight.run.launcher.child" in command[:-1]:
        return command[command.index(b"midflight.run.launcher.child") + 1].decode()
    return "trackers" if b"midflight.trackers.process" in command else ""


def _accounted_bytes() -> int:
    here = resource.getrusage(resource.RUSAGE_SELF)
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (here.ru_maxrss + below.ru_maxrss) * 1024
