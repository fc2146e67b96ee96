"""The port of sandboxes: the input and the result of a program, and the limits of its processes."""

import asyncio
import io
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from midflight.config.agents import SandboxSection

LOOK_SECONDS = 0.1
OUTPUT_BYTES = 1_000_000
"""The most bytes of a program's output, and of its errors, past which it is ended."""
Ended = Literal["time", "memory", "output"]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The end of a program, and its output."""

    status: int | None
    """Its exit status, or below 0 the number of a signal. None if a limit ended it."""
    stdout: str
    """Its standard output, cut to the limit. Bytes that are not UTF-8 are replaced."""
    stderr: str
    seconds: float
    ended_by: Ended | None = None
    """The limit that ended it."""

    @property
    def ok(self) -> bool:
        return self.status == 0


class Sandbox(Protocol):
    """Runs programs that are not trusted. One object serves any number at once."""

    def check(self) -> None:
        """Tries once whether it can isolate. Raises `SandboxUnavailable` with the reason and the
        remedy if not.
        """
        ...

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str | bytes] = ..., stdin: str = ""
    ) -> ProgramResult:
        """Runs a program, and waits for its end. A limit or cancellation ends it too, after which
        nothing of it runs any more.

        `files` are put into its working folder, by paths relative to that. Files that the program
        leaves behind are gone with it. Raises `SandboxLost` if there is no sandbox to run it in.
        That says nothing about the program, so nothing may be scored by it.
        """
        ...

    async def python(
        self, code: str, *, files: Mapping[str, str | bytes] = ..., stdin: str = ""
    ) -> ProgramResult:
        """Runs a Python program in the same way, with this interpreter's packages if the sandbox
        has them.
        """
        ...


class Box(Protocol):
    """A sandbox for several programs, one after another. A program finds the folders as the one
    before it left them.
    """

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = ...,
        stdin: str = "",
        seconds: float | None = None,
    ) -> ProgramResult:
        """Runs a program as a sandbox does. `files` are put there before, by absolute path.
        `seconds` takes the place of the section's limit.
        """
        ...


@dataclass(frozen=True, slots=True)
class BoxSetup:
    """The contents with which a box begins."""

    folders: Sequence[str] = ()
    """The folders that its programs write to, by absolute path."""
    start: str = "."
    """The folder in which programs start; by default the one that its image names."""
    image: str = ""
    """The image of a box elsewhere, in place of the section's."""
    build: Path | None = None
    """A folder with a Dockerfile, which is built for the box."""
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    seconds: float = 3600.0
    """The seconds that a box elsewhere lives. After that its maker ends it, even if this process
    has died.
    """


def packed(files: Mapping[str, str | bytes]) -> bytes:
    """A tar archive of files by absolute path. All of them may be executed."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size = len(data)
            entry.mode = 0o755
            tar.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


def checked(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """The files as bytes. Raises `ValueError` for a path that leads out of the folder."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(
                f"files of a sandbox lie in its working folder: {name!r} does not; give a relative "
                "path without '..'."
            )
    return {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}


class LimitedProcess:
    """A process with three pipes that was just started, under its limits."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        limits: SandboxSection,
        *,
        held: Callable[[], int],
        kill: Callable[[], None],
        ran_out: Callable[[], bool] = lambda: False,
    ) -> None:
        """`held` gives the bytes of memory that the process and its descendants have now. `kill`
        ends them all. `ran_out` says whether the kernel has ended one of them for its memory.
        """
        self._process = process
        self._limits = limits
        self._held = held
        self._kill = kill
        self._ran_out = ran_out
        self._why: Ended | None = None

    async def ended(self, stdin: str) -> ProgramResult:
        """Waits for the end of the process. A limit or cancellation ends it too. After that nothing
        of it runs any more.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.TaskGroup() as tasks:
                out = tasks.create_task(self._read(self._process.stdout))
                err = tasks.create_task(self._read(self._process.stderr))
                beside = [tasks.create_task(self._write(stdin)), tasks.create_task(self._watch())]
                try:
                    async with asyncio.timeout(self._limits.seconds):
                        await self._process.wait()
                except TimeoutError:
                    self._end("time")
                self._kill()  # ends the processes that it left
                await self._process.wait()
                for task in beside:
                    task.cancel()
                if self._ran_out():
                    self._why = self._why or "memory"
        finally:
            self._kill()
            await self._process.wait()  # returns at once
        status = None if self._why else self._process.returncode
        return ProgramResult(status, out.result(), err.result(), loop.time() - began, self._why)

    def _end(self, why: Ended) -> None:
        self._why = self._why or why
        self._kill()

    async def _read(self, stream: asyncio.StreamReader | None) -> str:
        """Reads until the stream's end, or until there is more than the limit."""
        assert stream is not None
        found = b""
        while more := await stream.read(65536):
            found += more[: OUTPUT_BYTES - len(found) + 1]
            if len(found) > OUTPUT_BYTES:
                self._end("output")
        return found[:OUTPUT_BYTES].decode(errors="replace")

    async def _write(self, text: str) -> None:
        """Waits until everything is read, or nothing reads it any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            await self._process.stdin.drain()
        except ConnectionError:
            pass
        finally:
            self._process.stdin.close()

    async def _watch(self) -> None:
        """Reads the memory at an interval, until it is too much. Its task group ends it."""
        while True:
            if self._ran_out() or self._held() > self._limits.memory_mb * 2**20:
                return self._end("memory")
            await asyncio.sleep(LOOK_SECONDS)


PYTHON = (sys.executable, "-I", "-B", "main.py")
"""The command of a Python program on this machine. It imports nothing from its surroundings, and
keeps nothing compiled.
"""
