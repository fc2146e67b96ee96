"""Namespaces of Linux by `bubblewrap`: own processes, network, users, host name and files, none of ours among them.

The program sees the system's programs and this interpreter, read only; a working folder, `/tmp` and `/dev/shm` in memory, each of
`disk_mb` at most; no network but a loopback of its own, unless it is given the machine's; no variable of our environment. It runs as a user that
nobody is, on one processor, without any privilege, and ends with us.
"""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from midflight.config.agents import SandboxSection
from midflight.environments.sandboxes.port import PYTHON, Limited, Ran, checked
from midflight.errors import SandboxUnavailable

WORK = "/sandbox"
FIRST_USER, NUM_USERS = 1_000_000, 60_000_000
"""Users of sandboxes, where we are root: another for each program, because a user's processes are counted together."""
REMEDY = (
    "install bubblewrap (apt-get install bubblewrap) and allow namespaces to users (sysctl kernel.unprivileged_userns_clone=1), name a class "
    'that runs programs elsewhere in environment.sandbox.kind, or say that they can be trusted with "trusted"'
)
SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
NAMES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl")
"""With the machine's network."""


class Bubblewrap:
    """Implements `Sandbox`."""

    def __init__(self, limits: SandboxSection) -> None:
        self._limits = limits
        self._program = shutil.which("bwrap")
        self._users = itertools.count(os.getpid() * 1009)

    def check(self) -> None:
        if self._program is None:
            raise SandboxUnavailable(f"environment.sandbox isolates by bubblewrap, which is not installed: {REMEDY}.")
        tried = subprocess.run([*self._words([]), "true"], capture_output=True, text=True, timeout=60)
        if tried.returncode:
            raise SandboxUnavailable(f"environment.sandbox cannot isolate here ({tried.stderr.strip()[-300:]}): {REMEDY}.")

    async def python(self, code: str, *, files: Mapping[str, str | bytes] = {}, stdin: str = "") -> Ran:
        return await self.run(PYTHON, files={**files, "main.py": code}, stdin=stdin)

    async def run(self, command: Sequence[str], *, files: Mapping[str, str | bytes] = {}, stdin: str = "") -> Ran:
        with ExitStack() as stack:
            given = [(name, stack.enter_context(_in_memory(data))) for name, data in checked(files).items()]
            process = await asyncio.create_subprocess_exec(
                *self._words([(name, file.fileno()) for name, file in given]), *command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                pass_fds=[file.fileno() for _, file in given], env={},
            )  # fmt: skip
        return await Limited(process, self._limits, held=lambda: resident(process.pid), kill=lambda: kill(process)).ended(stdin)

    def _words(self, files: Sequence[tuple[str, int]]) -> list[str]:
        """Everything before the program's own words."""
        limits, is_root = self._limits, os.geteuid() == 0
        size = str(limits.disk_mb * 2**20)
        users = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        words = [
            self._program or "bwrap",
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            "--hostname",
            "sandbox",
        ]
        words += users if is_root else ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
        words += [] if limits.network else ["--unshare-net"]
        words += ["--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"]
        words += ["--setenv", "HOME", WORK, "--setenv", "LANG", "C.UTF-8", "--setenv", "OMP_NUM_THREADS", "1"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        words += [word for path in (WORK, "/tmp", "/dev/shm") for word in ("--perms", "0777", "--size", size, "--tmpfs", path)]
        for path in _shown(network=limits.network):
            words += [word for above in reversed(Path(path).parents[:-1]) for word in ("--perms", "0755", "--dir", str(above))]
            words += ["--ro-bind", path, path]
        words += [word for name, fd in files for word in ("--perms", "0644", "--file", str(fd), f"{WORK}/{name}")]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK, "--"]
        user = str(FIRST_USER + next(self._users) % NUM_USERS)
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
        sizes = {"as": limits.memory_mb * 2**20, "fsize": limits.disk_mb * 2**20, "nproc": limits.processes, "nofile": 256, "core": 0}
        processors = sorted(os.sched_getaffinity(0))
        taken = processors[next(self._users) % len(processors)]
        cpu = max(1, round(limits.seconds))
        return ["taskset", "-c", str(taken), "prlimit", f"--cpu={cpu}", *(f"--{name}={size}" for name, size in sizes.items()), "--"]


def _shown(*, network: bool) -> Iterator[str]:
    yield from (path for path in (*SHOWN, *(NAMES if network else ())) if Path(path).exists())
    yield from dict.fromkeys(path for path in (sys.prefix, sys.base_prefix) if not path.startswith("/usr"))


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
