"""Namespaces of Linux by `bubblewrap`: own processes, network, users, host name and files, none of
ours among them.

The program sees the system's programs and this interpreter, read only; a working folder, `/tmp` and
`/dev/shm` in memory, each of `disk_mb` at most; no network but a loopback of its own, unless it is
given the machine's; no variable of our environment. It runs as a user that nobody is, on one
processor, without any privilege, and ends with us.
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
    Furnished,
    Limited,
    Ran,
    checked,
    packed,
)
from midflight.errors import SandboxUnavailable

WORK = "/sandbox"
FIRST_USER = 1_000_000
NUM_USERS = 60_000_000
"""Users of sandboxes, where we are root: another for each program, because a user's processes are
counted together.
"""
_programs = itertools.count()
REMEDY = (
    "install bubblewrap (apt-get install bubblewrap) and allow namespaces to users (sysctl "
    "kernel.unprivileged_userns_clone=1), name a class "
    "that runs programs elsewhere in environment.sandbox.kind, or say that they can be trusted "
    'with "trusted"'
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
"""With the machine's network."""
KEEPING = """
before=$1 after=$2 folders=$3 start=$4; shift 4
for each in $before; do tar -xf /dev/fd/$each -C / || exit 125; done
mkdir -p "$start" && cd "$start" || exit 125
"$@"; status=$?
cd / && find $folders -mindepth 1 -maxdepth 1 -print0 | tar -cf /dev/fd/$after --null -T - || : >/dev/fd/$after
exit $status
"""
"""Runs a program between what others left in its folders and what it leaves there itself."""


class Bubblewrap:
    """Implements `LastingSandbox`."""

    def __init__(self, limits: SandboxSection) -> None:
        self._limits = limits
        self._program = shutil.which("bwrap")

    def check(self) -> None:
        if self._program is None:
            raise SandboxUnavailable(
                f"environment.sandbox isolates by bubblewrap, which is not installed: {REMEDY}."
            )
        tried = subprocess.run([*self._words([]), "true"], capture_output=True, text=True)
        if tried.returncode:
            raise SandboxUnavailable(
                f"environment.sandbox cannot isolate here ({tried.stderr.strip()[-300:]}): "
                f"{REMEDY}."
            )

    async def python(
        self, code: str, *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> Ran:
        return await self.run(PYTHON, files={**files, "main.py": code}, stdin=stdin)

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> Ran:
        with ExitStack() as stack:
            given = [
                (f"{WORK}/{name}", stack.enter_context(_in_memory(data)))
                for name, data in checked(files).items()
            ]
            words = self._words([(path, file.fileno()) for path, file in given])
            return await self.ended([*words, *command], stdin, passed=[file for _, file in given])

    @asynccontextmanager
    async def opened(self, furnished: Furnished) -> AsyncGenerator[Box]:
        yield LocalBox(self._limits, furnished)

    def within(self, folders: Sequence[str]) -> list[str]:
        """Everything before the words of a program that writes to these folders too."""
        return self._words([], folders)

    async def ended(self, words: Sequence[str], stdin: str, *, passed: Sequence[BinaryIO]) -> Ran:
        """Waits for the end of a process that gets these files open; as `Limited`."""
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=[file.fileno() for file in passed],
            env={},
        )
        return await Limited(
            process, self._limits, held=lambda: resident(process.pid), kill=lambda: kill(process)
        ).ended(stdin)

    def _words(self, files: Sequence[tuple[str, int]], folders: Sequence[str] = ()) -> list[str]:
        """Everything before the program's own words."""
        limits = self._limits
        is_root = os.geteuid() == 0
        size = str(limits.disk_mb * 2**20)
        users = [
            "--cap-drop",
            "ALL",
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "--cap-add",
            "CAP_SETPCAP",
        ]
        words = [
            self._program or "bwrap",
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            "--hostname",
            "sandbox",
        ]
        words += (
            users
            if is_root
            else ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
        )
        words += [] if limits.network else ["--unshare-net"]
        words += [
            "--die-with-parent",
            "--new-session",
            "--clearenv",
            "--setenv",
            "PATH",
            f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        ]
        words += [
            "--setenv",
            "HOME",
            WORK,
            "--setenv",
            "LANG",
            "C.UTF-8",
            "--setenv",
            "OMP_NUM_THREADS",
            "1",
        ]
        words += ["--proc", "/proc", "--dev", "/dev"]
        words += [
            word
            for path in (WORK, "/tmp", "/dev/shm", *folders)
            for word in ("--perms", "0777", "--size", size, "--tmpfs", path)
        ]
        for path in _shown(network=limits.network):
            words += [
                word
                for above in reversed(Path(path).parents[:-1])
                for word in ("--perms", "0755", "--dir", str(above))
            ]
            words += ["--ro-bind", path, path]
        words += [
            word for path, fd in files for word in ("--perms", "0644", "--file", str(fd), path)
        ]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK, "--"]
        user = str(FIRST_USER + (os.getpid() * 1009 + next(_programs)) % NUM_USERS)
        if is_root:
            words += [
                "setpriv",
                "--reuid",
                user,
                "--regid",
                user,
                "--clear-groups",
                "--no-new-privs",
                "--bounding-set=-all",
                "--inh-caps=-all",
            ]
        return [*words, *self._limited()]

    def _limited(self) -> list[str]:
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
        return [
            "taskset",
            "-c",
            str(taken),
            "prlimit",
            f"--cpu={cpu}",
            *(f"--{name}={size}" for name, size in sizes.items()),
            "--",
        ]


class LocalBox:
    """Implements `Box`: each program has a sandbox of its own, with the files that the one before
    it left. No process outlives its program, and of one that a limit ended nothing is kept."""

    def __init__(self, limits: SandboxSection, furnished: Furnished) -> None:
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
    ) -> Ran:
        sandbox = Bubblewrap(
            self._limits.model_copy(update={"seconds": seconds or self._limits.seconds})
        )
        self._archives += [packed(files)] if files else []
        with ExitStack() as stack:
            before = [stack.enter_context(_in_memory(archive)) for archive in self._archives]
            after = stack.enter_context(_in_memory(b""))
            numbers = " ".join(str(file.fileno()) for file in before)
            names = " ".join(path[1:] for path in self._folders)
            words = [
                *sandbox.within(self._folders),
                "sh",
                "-c",
                KEEPING,
                "sh",
                numbers,
                str(after.fileno()),
                names,
                self._start,
                *command,
            ]
            ran = await sandbox.ended(words, stdin, passed=[*before, after])
            after.seek(0)
            if ran.ended_by is None and (kept := after.read()):
                self._archives = [kept]
        return (
            replace(ran, status=128 - ran.status) if ran.status and 128 < ran.status <= 192 else ran
        )


def _shown(*, network: bool) -> Iterator[str]:
    yield from (path for path in (*SHOWN, *(NAMES if network else ())) if Path(path).exists())
    yield from dict.fromkeys(
        path for path in (sys.prefix, sys.base_prefix) if not path.startswith("/usr")
    )


def _in_memory(data: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("file"), "r+b")
    file.write(data)
    file.flush()
    file.seek(0)
    return file


def kill(process: asyncio.subprocess.Process) -> None:
    """And with it its namespace, so that nothing in it is left."""
    if process.returncode is None:
        process.kill()


def resident(pid: int) -> int:
    """Bytes that a process and all below it hold; those that end meanwhile count as none."""
    held = 0
    try:
        held += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            held += sum(resident(int(below)) for below in (thread / "children").read_text().split())
    except (OSError, IndexError):
        pass
    return held
