"""The port: what a sandbox is given, and what it says; and the limits that any process is held
to.
"""

import asyncio
import io
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from midflight.config.agents import SandboxSection

LOOK_SECONDS = 0.1
Ended = Literal["time", "memory", "output"]


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program."""

    status: int | None
    """Its exit status, below 0 the number of a signal; None if a limit ended it."""
    stdout: str
    """What it wrote, cut to the limit; bytes that are no UTF-8 are replaced."""
    stderr: str
    seconds: float
    ended_by: Ended | None = None
    """Which limit ended it."""

    @property
    def ok(self) -> bool:
        return self.status == 0


class Sandbox(Protocol):
    """Runs programs that nobody trusts. One object serves any number at once."""

    def check(self) -> None:
        """Tries once whether it can isolate. `SandboxUnavailable` says why not, and what to do."""
        ...

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str | bytes] = ..., stdin: str = ""
    ) -> Ran:
        """Waits for the program's end; ended by it, by a limit, or by cancellation, after which
        nothing of it runs any more.

        `files` lie in its working folder, by path relative to that. What it leaves behind is gone
        with it. `SandboxLost` if there is no sandbox to run it in: that says nothing about the
        program, so nothing must be scored by it.
        """
        ...

    async def python(
        self, code: str, *, files: Mapping[str, str | bytes] = ..., stdin: str = ""
    ) -> Ran:
        """The same of a Python program, with this interpreter's packages where the sandbox has
        them.
        """
        ...


class Box(Protocol):
    """A sandbox for several programs, one after another: what one leaves in its folders the next
    one finds.
    """

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = ...,
        stdin: str = "",
        seconds: float | None = None,
    ) -> Ran:
        """As that of a sandbox. `files` are put there before, by absolute path; `seconds` takes the
        place of the section's.
        """
        ...


@dataclass(frozen=True, slots=True)
class Furnished:
    """What a box begins with."""

    folders: Sequence[str] = ()
    """That its programs write to, by absolute path."""
    start: str = "."
    """Where they start; by default where its image says."""
    image: str = ""
    """In place of the section's, of a box elsewhere."""
    build: Path | None = None
    """A folder with a Dockerfile, which is built for it."""
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    seconds: float = 3600.0
    """Of its whole life, where it is elsewhere: after that its maker ends it, whatever became of
    us.
    """


class LastingSandbox(Sandbox, Protocol):
    """One that has boxes too."""

    def opened(self, furnished: Furnished) -> AbstractAsyncContextManager[Box]:
        """Within it the box is there. `SandboxLost` if none can be had."""
        ...


def packed(files: Mapping[str, str | bytes]) -> bytes:
    """A tar archive of files by absolute path; all of them may be executed."""
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
    """As bytes. `ValueError` for a path that leads out of the folder."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(
                f"files of a sandbox lie in its working folder: {name!r} does not; give a relative "
                "path without '..'."
            )
    return {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}


class Limited:
    """A process with three pipes that was just started, under its limits."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        limits: SandboxSection,
        *,
        held: Callable[[], int],
        kill: Callable[[], None],
    ) -> None:
        """`held`: bytes of memory that it and all below it have now. `kill` ends them all."""
        self._process = process
        self._limits = limits
        self._held = held
        self._kill = kill
        self._why: Ended | None = None

    async def ended(self, stdin: str) -> Ran:
        """Waits for its end; ended by it, by a limit, or by cancellation. Then nothing of it runs
        any more.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.TaskGroup() as tasks:
                out, err = (
                    tasks.create_task(self._read(stream))
                    for stream in (self._process.stdout, self._process.stderr)
                )
                beside = [tasks.create_task(self._write(stdin)), tasks.create_task(self._watch())]
                try:
                    async with asyncio.timeout(self._limits.seconds):
                        await self._process.wait()
                except TimeoutError:
                    self._end("time")
                self._kill()  # what it left behind
                await self._process.wait()
                for task in beside:
                    task.cancel()
        finally:
            self._kill()
            await self._process.wait()  # at once
        status = None if self._why else self._process.returncode
        return Ran(status, out.result(), err.result(), loop.time() - began, self._why)

    def _end(self, why: Ended) -> None:
        self._why = self._why or why
        self._kill()

    async def _read(self, stream: asyncio.StreamReader | None) -> str:
        """Waits for the stream's end, or for more than may be."""
        assert stream is not None
        found = b""
        most = self._limits.output_bytes
        while more := await stream.read(65536):
            found += more[: most - len(found) + 1]
            if len(found) > most:
                self._end("output")
        return found[:most].decode(errors="replace")

    async def _write(self, text: str) -> None:
        """Waits until all is read, or nobody reads it any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            await self._process.stdin.drain()
        except ConnectionError:
            pass
        finally:
            self._process.stdin.close()

    async def _watch(self) -> None:
        """Waits for the interval to pass, until it is too much; ended by its task group."""
        while True:
            if self._held() > self._limits.memory_mb * 2**20:
                return self._end("memory")
            await asyncio.sleep(LOOK_SECONDS)


PYTHON = (sys.executable, "-I", "-B", "main.py")
"""On this machine: nothing of the surroundings is imported, and nothing compiled is kept."""
