"""Control groups of the kernel (cgroups), which count the memory and the processes of a program
together, whatever it does.

A program gets a group of its own, below the nearest group of ours in which this user may make one:
root may in most places, another user where its group is delegated to it. Version 2 is asked first.
Version 1 serves where the machine keeps memory and processes there.
"""

import atexit
import itertools
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
REMEDY = (
    "start the run as root, or in a group that is delegated (systemd-run --user -p Delegate=yes "
    "-p DelegateSubgroup=run -t midflight ...), or set a limit of memory on its container"
)
ENTER = """
for group in $1; do echo 0 > "$group/cgroup.procs" || exit 126; done
shift; exec "$@"
"""
"""A script that goes into groups, and then becomes another program."""
_numbers = itertools.count()
_still_there = set[Path]()
"""Groups of programs that have ended, some of whose processes may not quite have."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder of groups, and the files of a group there that hold its limits. A file that a
    machine lacks is left out if it is one of swap.
    """

    folder: Path
    memory: str = ""
    swap: str = ""
    swap_counts_memory: bool = False
    processes: str = ""
    events: str = ""
    """The file that says how many processes the kernel has ended for their memory."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The group of one program: a folder in each hierarchy."""

    places: Sequence[tuple[Hierarchy, Path]]

    def entered_by(self, words: Sequence[str]) -> list[str]:
        """A command that goes into the group, and then becomes the given one."""
        folders = " ".join(str(folder) for _, folder in self.places)
        return ["/bin/sh", "-c", ENTER, "sh", folders, *words]

    @property
    def was_entered(self) -> bool:
        """True if any process has taken memory in the group."""
        for hierarchy, folder in self.places:
            if hierarchy.events:
                return bool(_counts(folder / "memory.stat").get("pgfault"))
        return False

    @property
    def ran_out(self) -> bool:
        """True if the kernel has ended a process of the group for its memory."""
        for hierarchy, folder in self.places:
            if hierarchy.events and _counts(folder / hierarchy.events).get("oom_kill"):
                return True
        return False

    def remove(self) -> None:
        """Ends what is left in the group, and removes it. A process that takes longer to end
        leaves its group to the next call of `new_group`.
        """
        for _, folder in self.places:
            kill = folder / "cgroup.kill"
            if kill.exists():
                with suppress(OSError):
                    kill.write_text("1")
            _still_there.add(folder)
        _remove_those_left()


def new_group(*, memory_bytes: int, processes: int) -> ControlGroup | None:
    """A group with these limits, or None where none can be had. Raises `OSError` if one could be
    had before, and cannot any more.
    """
    hierarchies = found_hierarchies()
    if hierarchies is None:
        return None
    _remove_those_left()
    return _made(hierarchies, memory_bytes=memory_bytes, processes=processes)


@cache
def found_hierarchies() -> tuple[Hierarchy, ...] | None:
    """The hierarchies in which this process may make groups and enter them, which it tries."""
    for hierarchies in _candidates(ROOT, OWN):
        _remove_those_of_the_dead(hierarchies)
        with suppress(OSError):
            group = _made(hierarchies, memory_bytes=2**30, processes=64)
            tried = subprocess.run(group.entered_by(["true"]), capture_output=True)
            group.remove()
            if tried.returncode == 0:
                return hierarchies
    return None


def _candidates(root: Path, own: Path) -> Iterator[tuple[Hierarchy, ...]]:
    """The hierarchies that may do, the best first."""
    paths = dict[str, str]()
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path.lstrip("/")
    for mount in (root, root / "unified"):
        if "" in paths and (mount / "cgroup.controllers").is_file():
            yield from _unified(mount, mount / paths[""])
    if "memory" in paths and "pids" in paths:
        memory = Hierarchy(
            root / "memory" / paths["memory"],
            memory="memory.limit_in_bytes",
            swap="memory.memsw.limit_in_bytes",
            swap_counts_memory=True,
            events="memory.oom_control",
        )
        yield memory, Hierarchy(root / "pids" / paths["pids"], processes="pids.max")


def _unified(mount: Path, own: Path) -> Iterator[tuple[Hierarchy, ...]]:
    """Our own group and those above it, as far as they count memory and processes in the groups
    below them. A group with processes in it cannot, unless it is the machine's.
    """
    for folder in (own, *own.parents):
        with suppress(OSError):
            names = (folder / "cgroup.controllers").read_text().split()
            control = folder / "cgroup.subtree_control"
            if "memory" in names and "pids" in names:
                if not {"memory", "pids"} <= set(control.read_text().split()):
                    control.write_text("+memory +pids")
                yield (
                    Hierarchy(
                        folder,
                        memory="memory.max",
                        swap="memory.swap.max",
                        processes="pids.max",
                        events="memory.events",
                    ),
                )
        if folder == mount:
            return


def _made(hierarchies: Iterable[Hierarchy], *, memory_bytes: int, processes: int) -> ControlGroup:
    """Makes a group with its limits. Raises `OSError` if that is not possible; then nothing is
    left of it.
    """
    name = f"{_prefix()}-{os.getpid()}-{next(_numbers)}"
    group = ControlGroup([(each, each.folder / name) for each in hierarchies])
    try:
        for hierarchy, folder in group.places:
            folder.mkdir()
            if hierarchy.memory:
                (folder / hierarchy.memory).write_text(str(memory_bytes))
            if hierarchy.swap and (folder / hierarchy.swap).exists():
                swap = memory_bytes if hierarchy.swap_counts_memory else 0
                (folder / hierarchy.swap).write_text(str(swap))
            if hierarchy.processes:
                (folder / hierarchy.processes).write_text(str(processes))
    except OSError:
        group.remove()
        raise
    return group


@atexit.register
def _remove_those_left() -> None:
    for folder in list(_still_there):
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            continue
        _still_there.discard(folder)


def _remove_those_of_the_dead(hierarchies: Iterable[Hierarchy]) -> None:
    """Removes empty groups of processes that were killed. Only those that this process would see
    are looked at: another container may have others.
    """
    for hierarchy in hierarchies:
        for folder in hierarchy.folder.glob(f"{_prefix()}-*"):
            pid = folder.name.split("-")[-2]
            if not Path(f"/proc/{pid}").exists():
                with suppress(OSError):
                    folder.rmdir()


def _prefix() -> str:
    return f"midflight-{Path('/proc/self/ns/pid').stat().st_ino}"


def _counts(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number on each line."""
    counts = dict[str, int]()
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            if number.isdigit():
                counts[name] = int(number)
    return counts
