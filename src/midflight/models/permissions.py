"""Permissions of files that were made through temporary ones: those of any new file here.

Temporary files and folders are their owner's alone. So are the files that safetensors writes, which
it makes through temporary ones. Torch-free.
"""

import os
import stat
from pathlib import Path

STATUS = Path("/proc/self/status")
"""The file with this process's umask in a line of its own."""


def open_to_others(path: Path) -> None:
    """Gives a file, or a folder and all that is in it, the permissions that new ones get by this
    process's umask. A folder hands its group down if it did so before.
    """
    mask = _umask()
    for one in (path, *path.rglob("*")):
        if not one.is_symlink():
            handed_down = one.stat().st_mode & stat.S_ISGID if one.is_dir() else 0
            one.chmod((0o777 if one.is_dir() else 0o666) & ~mask | handed_down)


def _umask() -> int:
    """This process's umask. If the kernel does not say it, it must be set to be read. Files that
    other threads make in that instant can be read by their owner only.
    """
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
