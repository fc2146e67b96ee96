"""A sandbox made of Linux namespaces by `bubblewrap`: a program has its own processes, network,
users, host name and files, and sees none of ours.

The program sees the system's programs and this interpreter, read only. Its working folder, `/tmp`
and `/dev/shm` are in memory, each of `disk_mb` at most. It has only a loopback network of its own,
unless it is given the machine's, and no variable of our environment. It runs as a user of its own,
on one processor, without any privilege, and ends with us.
"""

import asyncio
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
from midflight.environments.sandboxes.port import (
    PYTHON,
    Box,
    BoxSetup,
    LimitedProcess,
    ProgramResult,
    checked,
    packed,
)
from midflight.errors import SandboxUnavailable

WORK = "/sandbox"
FIRST_USER = 1_000_000
NUM_USERS = 60_000_000
"""The users of sandboxes, if we are root. Each program has another user, because the processes of a
user are counted together.
"""
_programs = itertools.count()
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


class Bubblewrap:
    """A sandbox on this machine. Implements `Sandbox`, and has boxes too."""

    def __init__(self, limits: SandboxSection) -> None:
        self._limits = limits
        self._program = shutil.which("bwrap")

    def check(self) -> None:
        if self._program is None:
            raise SandboxUnavailable(
                f"environment.sandbox isolates by bubblewrap, which is not installed: {REMEDY}."
            )
        words = self._words([])
        words.append("true")
        tried = subprocess.run(words, capture_output=True, text=True)
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
            passed: list[BinaryIO] = []
            given: list[tuple[str, int]] = []
            for name, data in checked(files).items():
                file = stack.enter_context(_in_memory(data))
                passed.append(file)
                given.append((f"{WORK}/{name}", file.fileno()))
            words = self._words(given)
            words += command
            return await self.ended(words, stdin, passed=passed)

    @asynccontextmanager
    async def opened(self, furnished: BoxSetup) -> AsyncGenerator[Box]:
        yield LocalBox(self._limits, furnished)

    def within(self, folders: Sequence[str]) -> list[str]:
        """Everything before the words of a program that writes to these folders too."""
        return self._words([], folders)

    async def ended(
        self, words: Sequence[str], stdin: str, *, passed: Sequence[BinaryIO]
    ) -> ProgramResult:
        """Waits for the end of a process that gets these files open. It ends as `LimitedProcess`
        does.
        """
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=[file.fileno() for file in passed],
            env={},
        )
        limited = LimitedProcess(
            process, self._limits, held=lambda: resident(process.pid), kill=lambda: kill(process)
        )
        return await limited.ended(stdin)

    def _words(self, files: Sequence[tuple[str, int]], folders: Sequence[str] = ()) -> list[str]:
        """Everything before the program's own words."""
        is_root = os.geteuid() == 0
        words = [self._program or "bwrap"]
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
        words += ["--chdir", WORK, "--"]
        user = str(FIRST_USER + (os.getpid() * 1009 + next(_programs)) % NUM_USERS)
        if is_root:
            words += ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
            words += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        words += self._limited()
        return words

    def _mounts(self, files: Sequence[tuple[str, int]], folders: Sequence[str]) -> list[str]:
        """Returns the arguments that give the program its files and its writable folders."""
        size = str(self._limits.disk_mb * 2**20)
        words = ["--proc", "/proc", "--dev", "/dev"]
        for path in (WORK, "/tmp", "/dev/shm", *folders):
            words += ["--perms", "0777", "--size", size, "--tmpfs", path]
        for path in _shown(network=self._limits.network):
            for above in reversed(Path(path).parents[:-1]):
                words += ["--perms", "0755", "--dir", str(above)]
            words += ["--ro-bind", path, path]
        for path, descriptor in files:
            words += ["--perms", "0644", "--file", str(descriptor), path]
        words += ["--remount-ro", "/dev", "--remount-ro", "/"]
        return words

    def _limited(self) -> list[str]:
        """The words that bind the program to one processor and to its limits."""
        limits = self._limits
        sizes = {
            "as": limits.memory_mb * 2**20,
            "fsize": limits.disk_mb * 2**20,
            "nproc": limits.processes,
            "nofile": 256,
            "core": 0,
        }
        processors = sorted(os.sched_getaffinity(0))
        taken = processors[next(_programs) % len(processors)]
        cpu = max(1, round(limits.seconds))
        words = ["taskset", "-c", str(taken), "prlimit", f"--cpu={cpu}"]
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
        sandbox = Bubblewrap(limits)
        if files:
            self._archives.append(packed(files))
        with ExitStack() as stack:
            before = [stack.enter_context(_in_memory(archive)) for archive in self._archives]
            after = stack.enter_context(_in_memory(b""))
            numbers = " ".join(str(file.fileno()) for file in before)
            names = " ".join(path[1:] for path in self._folders)
            words = sandbox.within(self._folders)
            words += ["sh", "-c", KEEPING, "sh"]
            words += [numbers, str(after.fileno()), names, self._start]
            words += command
            ran = await sandbox.ended(words, stdin, passed=[*before, after])
            after.seek(0)
            kept = b"" if ran.ended_by is not None else after.read()
            if kept:
                self._archives = [kept]
        if ran.status and 128 < ran.status <= 192:  # a signal, as a shell says it
            return replace(ran, status=128 - ran.status)
        return ran


def _shown(*, network: bool) -> Iterator[str]:
    """The paths of this machine that a program sees."""
    shown = SHOWN + NAMES if network else SHOWN
    for path in shown:
        if Path(path).exists():
            yield path
    for path in dict.fromkeys((sys.prefix, sys.base_prefix)):
        if not path.startswith("/usr"):
            yield path


def _in_memory(data: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("file"), "r+b")
    file.write(data)
    file.flush()
    file.seek(0)
    return file


def kill(process: asyncio.subprocess.Process) -> None:
    """Ends a process, and with it its namespace, so that nothing in that is left."""
    if process.returncode is None:
        process.kill()


def resident(pid: int) -> int:
    """Bytes that a process and its descendants hold. Processes that end meanwhile do not count."""
    held = 0
    try:
        held += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            held += sum(resident(int(below)) for below in (thread / "children").read_text().split())
    except (OSError, IndexError):
        pass
    return held
