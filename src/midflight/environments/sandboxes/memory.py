"""Measures the memory that the processes of a program hold, as far as one sees it from outside. A
control group knows better, where there is one.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
SHARED = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) ...s ([0-9a-f]+) (\S+ \d+) +/dev/zero \(deleted\)$", re.MULTILINE
)
"""A mapping of anonymous shared memory in `/proc/PID/maps`: its ends, its offset in that memory, and
the device and inode by which all processes name the same.
"""
FILE_BYTES = 1024
"""The memory of the kernel for each file in memory, beside what the file holds."""


def resident(pid: int) -> int:
    """Bytes that a process and its descendants hold. Processes that end meanwhile do not count."""
    held = 0
    for each in descendants(pid):
        try:
            held += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * PAGE
        except (OSError, IndexError):
            continue
    return held


def shared(pid: int) -> int:
    """Bytes of anonymous memory that a process and its descendants have mapped as shared. Pages
    that no process looks at any more are in no other count.
    """
    sizes = dict[str, int]()
    for each in descendants(pid):
        try:
            maps = Path(f"/proc/{each}/maps").read_text()
        except OSError:
            continue
        for begin, end, offset, inode in SHARED.findall(maps):
            size = int(offset, 16) + int(end, 16) - int(begin, 16)
            sizes[inode] = max(size, sizes.get(inode, 0))
    return sum(sizes.values())


def of_files(pid: int, folder: str) -> int:
    """Bytes that the kernel takes for the number of files in a folder in memory, which a process
    below this one sees there.
    """
    _, *below = descendants(pid)
    for each in reversed(below):
        try:
            found = os.statvfs(f"/proc/{each}/root{folder}")
        except OSError:
            continue
        return (found.f_files - found.f_ffree) * FILE_BYTES
    return 0


def descendants(pid: int) -> Iterator[int]:
    """A process, and those below it that run now."""
    yield pid
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for below in (thread / "children").read_text().split():
                yield from descendants(int(below))
    except OSError:
        return
