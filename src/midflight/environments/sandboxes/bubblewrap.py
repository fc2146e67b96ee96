"""A sandbox made of Linux namespaces by `bubblewrap`: a program has its own processes, network,
users, host name and files, and sees none of ours.

The program sees the system's programs and this interpreter, read only. Its working folder, `/tmp`,
`/var/tmp` and `/dev/shm` lie in one folder in memory, of `disk_mb` at most. It has only a loopback
network of its own, unless it is given the machine's, and no variable of our environment. It runs as
a user of its own, on one processor, without any privilege, and ends with us. A filter refuses the
system calls that could lead out (`seccomp.py`), and a control group counts all its memory where one
can be had (`control_groups.py`).
"""

import asyncio
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from midflight.config.agents import SandboxSection
from midflight.environments.sandboxes.control_groups import ControlGroup, new_group
from midflight.environments.sandboxes.memory import of_files, resident, shared
from midflight.environments.sandboxes.port import (
    PYTHON,
    Box,
    BoxSetup,
    LimitedProcess,
    ProgramResult,
    checked,
    packed,
)
from midflight.environments.sandboxes.processors import processor_for
from midflight.environments.sandboxes.seccomp import call_filter
from midflight.errors import SandboxLost, SandboxUnavailable

FILES = "/sandbox"
"""The folder in memory, in which all others lie that a program writes to."""
WORK = f"{FILES}/work"
LINKS = {"/tmp": "tmp", "/var/tmp": "tmp", "/dev/shm": "shm"}
"""Folders that are links into the folder in memory, so that they share its room."""
DEVICES = "/devices"
DEVICE_NAMES = ("null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx")
STREAMS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
FIRST_USER = 1_000_000
NUM_USERS = 60_000_000
"""The users of sandboxes, if we are root. Each program has another user, because the processes of a
user are counted together.
"""
_programs = itertools.count()
OUR_PROCESSES = 3
"""Processes of bubblewrap and of the shell of a box, which the program does not count as its own."""
REMEDY = (
    "install bubblewrap (apt-get install bubblewrap) and allow namespaces to users (sysctl "
    "kernel.unprivileged_userns_clone=1), name a class that runs programs elsewhere in "
    'environment.sandbox.kind, or say that they can be trusted with "trusted"'
)
SHOWN = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
NAMES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl")
"""Files that a program sees if it has the machine's network."""
KEEPING = """
before=$1 after=$2 folders=$3 start=$4; shift 4
for each in $before; do tar -xf /dev/fd/$each -C / || exit 125; done
mkdir -p "$start" && cd "$start" || exit 125
"$@"; status=$?
cd / && find $folders -mindepth 1 -maxdepth 1 -print0 | tar -cf /dev/fd/$after --null -T - || : >/dev/fd/$after
exit $status
"""
"""A script that restores the folders as earlier programs left them, runs a program, and saves the
folders' contents.
"""


PROBE = """
import ctypes, os, sys
call = ctypes.CDLL(None, use_errno=True)
if call.unshare(0x10000000) == 0 or call.memfd_create(b"", 0) >= 0:
    raise SystemExit("system calls are not filtered")
for link in sys.argv[1:]:
    kind = link.partition(":")[0]
    if os.readlink(f"/proc/self/ns/{kind}") == link:
        raise SystemExit(f"the namespace of {kind} is the machine's")
"""
"""A program that ends well if the calls are filtered, and if none of its namespaces is one of those
that it is given.
"""


class Bubblewrap:
    """A sandbox on this machine. Implements `Sandbox`, and has boxes too."""

    def __init__(self, limits: SandboxSection) -> None:
        self._limits = limits
        self._program = shutil.which("bwrap")
        self._taskset = shutil.which("taskset") or "/usr/bin/taskset"

    def check(self) -> None:
        if self._program is None:
            raise SandboxUnavailable(
                f"environment.sandbox isolates by bubblewrap, which is not installed: {REMEDY}."
            )
        kinds = ["pid", "ipc", "uts", "mnt"]
        if not self._limits.network:
            kinds.append("net")
        with _in_memory(call_filter()) as calls:
            words = self._words(calls, min(os.sched_getaffinity(0)))
            words += [*PYTHON[:-1], "-c", PROBE]
            words += [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in kinds]
            try:
                tried = subprocess.run(
                    words, capture_output=True, text=True, pass_fds=[calls.fileno()]
                )
            except FileNotFoundError as error:
                raise SandboxUnavailable(
                    f"environment.sandbox needs {error.filename}, which is not installed; install "
                    "util-linux."
                ) from error
        if tried.returncode:
            raise SandboxUnavailable(
                f"environment.sandbox cannot isolate here ({tried.stderr.strip()[-300:]}): "
                f"{REMEDY}."
            )

    async def python(
        self, code: str, *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> ProgramResult:
        return await self.run(PYTHON, files={**files, "main.py": code}, stdin=stdin)

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> ProgramResult:
        with ExitStack() as stack:
            given: list[tuple[str, BinaryIO]] = []
            for name, data in checked(files).items():
                given.append((f"{WORK}/{name}", stack.enter_context(_in_memory(data))))
            return await self.ended(command, stdin, files=given)

    @asynccontextmanager
    async def opened(self, furnished: BoxSetup) -> AsyncGenerator[Box]:
        yield LocalBox(self._limits, furnished)

    async def ended(
        self,
        command: Sequence[str],
        stdin: str,
        *,
        files: Sequence[tuple[str, BinaryIO]] = (),
        folders: Sequence[str] = (),
        passed: Sequence[BinaryIO] = (),
    ) -> ProgramResult:
        """Waits for a processor, and then for the end of a program, which finds the files at their
        paths, writes to the folders too, and gets further files open. It ends as `LimitedProcess`
        does.
        """
        async with processor_for(network=self._limits.network) as processor:
            return await self._ended_on(processor, command, stdin, files, folders, passed)

    async def _ended_on(
        self,
        processor: int,
        command: Sequence[str],
        stdin: str,
        files: Sequence[tuple[str, BinaryIO]],
        folders: Sequence[str],
        passed: Sequence[BinaryIO],
    ) -> ProgramResult:
        limits = self._limits
        room = limits.disk_mb * (1 + len(folders))
        group = _new_group((limits.memory_mb + room) * 2**20, limits.processes + OUR_PROCESSES)
        try:
            with _in_memory(call_filter()) as calls:
                words = self._words(calls, processor, files=files, folders=folders)
                words += command
                opened = [calls, *passed]
                opened += [file for _, file in files]
                process = await asyncio.create_subprocess_exec(
                    *(group.entered_by(words) if group else words),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=[file.fileno() for file in opened],
                    env={},
                )
            limited = LimitedProcess(
                process,
                limits,
                held=lambda: held(process.pid, group),
                ran_out=lambda: group is not None and group.ran_out,
                kill=lambda: kill(process),
            )
            ran = await limited.ended(stdin)
            if group is not None and not group.was_entered:
                raise SandboxLost(
                    "a program of the sandbox could not enter its control group, so it did not run."
                )
            return ran
        finally:
            if group is not None:
                group.remove()

    def _words(
        self,
        calls: BinaryIO,
        processor: int,
        *,
        files: Sequence[tuple[str, BinaryIO]] = (),
        folders: Sequence[str] = (),
    ) -> list[str]:
        """Everything before the program's own words. `calls` is the filter of system calls."""
        is_root = os.geteuid() == 0
        words = [self._taskset, "-c", str(processor), self._program or "bwrap"]
        words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        words += ["--hostname", "sandbox"]
        if is_root:
            words += ["--cap-drop", "ALL"]
            words += ["--cap-add", "CAP_SETUID"]
            words += ["--cap-add", "CAP_SETGID"]
            words += ["--cap-add", "CAP_SETPCAP"]
        else:
            words += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
        if not self._limits.network:
            words += ["--unshare-net"]
        words += ["--die-with-parent", "--new-session", "--clearenv"]
        words += ["--setenv", "PATH", f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"]
        words += ["--setenv", "HOME", WORK]
        words += ["--setenv", "LANG", "C.UTF-8"]
        words += ["--setenv", "OMP_NUM_THREADS", "1"]
        words += self._mounts(files, folders)
        words += ["--seccomp", str(calls.fileno())]
        words += ["--chdir", WORK, "--"]
        user = str(FIRST_USER + (os.getpid() * 1009 + next(_programs)) % NUM_USERS)
        if is_root:
            words += ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
            words += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        words += self._limited()
        return words

    def _mounts(self, files: Sequence[tuple[str, BinaryIO]], folders: Sequence[str]) -> list[str]:
        """Returns the arguments that give the program its files and its writable folders."""
        size = str(self._limits.disk_mb * 2**20)
        words = ["--proc", "/proc", "--dev", DEVICES]
        for path in ("/dev", "/var"):
            words += ["--perms", "0755", "--dir", path]
        for path in (FILES, *folders):
            words += ["--perms", "0777", "--size", size, "--tmpfs", path]
        words += ["--perms", "0777", "--dir", WORK]
        for name in dict.fromkeys(LINKS.values()):
            words += ["--perms", "1777", "--dir", f"{FILES}/{name}"]
        for path, name in LINKS.items():
            if path not in folders:
                words += ["--symlink", f"{FILES}/{name}", path]
        for name in DEVICE_NAMES:
            words += ["--symlink", f"{DEVICES}/{name}", f"/dev/{name}"]
        for name, path in STREAMS.items():
            words += ["--symlink", path, f"/dev/{name}"]
        for path in _shown(network=self._limits.network):
            for above in reversed(Path(path).parents[:-1]):
                words += ["--perms", "0755", "--dir", str(above)]
            words += ["--ro-bind", path, path]
        for path, file in files:
            words += ["--perms", "0644", "--file", str(file.fileno()), path]
        for path in ("/proc", DEVICES, "/"):
            words += ["--remount-ro", path]
        return words

    def _limited(self) -> list[str]:
        """The words that bind the program to its limits."""
        limits = self._limits
        sizes = {
            "as": limits.memory_mb * 2**20,
            "fsize": limits.disk_mb * 2**20,
            "nproc": limits.processes,
            "nofile": 256,
            "msgqueue": 0,
            "core": 0,
        }
        cpu = max(1, round(limits.seconds))
        words = ["prlimit", f"--cpu={cpu}"]
        words += [f"--{name}={size}" for name, size in sizes.items()]
        words.append("--")
        return words


class LocalBox:
    """A box on this machine. Implements `Box`. Each program has a sandbox of its own, with the
    files that the one before it left. No process outlives its program, and a program that a limit
    ended leaves nothing.
    """

    def __init__(self, limits: SandboxSection, furnished: BoxSetup) -> None:
        self._limits = limits
        self._folders = furnished.folders
        self._start = furnished.start
        self._archives = [packed(furnished.files)]

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = {},
        stdin: str = "",
        seconds: float | None = None,
    ) -> ProgramResult:
        limits = self._limits.model_copy(update={"seconds": seconds or self._limits.seconds})
        if files:
            self._archives.append(packed(files))
        with ExitStack() as stack:
            before = [
                stack.enter_context(_in_memory(archive, sealed=True)) for archive in self._archives
            ]
            after = stack.enter_context(_in_memory(b""))
            numbers = " ".join(str(file.fileno()) for file in before)
            names = " ".join(path[1:] for path in self._folders)
            words = ["sh", "-c", KEEPING, "sh"]
            words += [numbers, str(after.fileno()), names, self._start]
            words += command
            ran = await Bubblewrap(limits).ended(
                words, stdin, folders=self._folders, passed=[*before, after]
            )
            after.seek(0)
            kept = b"" if ran.ended_by is not None else after.read()
            if kept:
                self._archives = [kept]
        if ran.status and 128 < ran.status <= 192:  # a signal, as a shell says it
            return replace(ran, status=128 - ran.status)
        return ran


def _new_group(memory_bytes: int, processes: int) -> ControlGroup | None:
    try:
        return new_group(memory_bytes=memory_bytes, processes=processes)
    except OSError as error:
        raise SandboxLost(
            f"making a control group for a program of the sandbox failed: {error}."
        ) from error


def _shown(*, network: bool) -> Iterator[str]:
    """The paths of this machine that a program sees."""
    shown = SHOWN + NAMES if network else SHOWN
    for path in shown:
        if Path(path).exists():
            yield path
    for path in dict.fromkeys((sys.prefix, sys.base_prefix)):
        if not path.startswith("/usr"):
            yield path


def _in_memory(data: bytes, *, sealed: bool = False) -> BinaryIO:
    """A file with these bytes. A program cannot change one that is sealed."""
    file = os.fdopen(os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
    file.write(data)
    file.flush()
    file.seek(0)
    if sealed:
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def kill(process: asyncio.subprocess.Process) -> None:
    """Ends a process, and with it its namespace, so that nothing in that is left."""
    if process.returncode is None:
        process.kill()


def held(pid: int, group: ControlGroup | None) -> int:
    """Bytes that a program holds, as `memory_mb` counts them. The kernel counts the rest itself
    where there is a group.
    """
    found = resident(pid)
    if group is None:
        found += shared(pid) + of_files(pid, FILES)
    return found
