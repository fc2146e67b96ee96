"""Programs in boxes on other machines. They are run and bounded in the same way for every maker."""

import asyncio
import base64
import gzip
import math
import shlex
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

from midflight.config.agents import SandboxSection
from midflight.environments.sandboxes.makers import MAKERS, Shell
from midflight.environments.sandboxes.port import (
    OUTPUT_BYTES,
    Box,
    BoxSetup,
    Ended,
    ProgramResult,
    checked,
    packed,
)
from midflight.errors import MidflightError, SandboxLost, SandboxUnavailable

HERE = "/tmp/.midflight"
WORK = "/tmp/sandbox"
ANSWER_SHARE = 0.2
"""A maker has this share of `start_seconds` for each answer."""
HELD_SHARE = 0.1
"""A program has this share of `start_seconds` to end after its limit. After that its box is asked
whether it is still there.
"""
CHUNK = 45_000
"""Characters of an archive in one command: Modal takes 64 KiB of arguments."""
FORGET = "for name in $(env | grep -E '^(E2B|DAYTONA|MODAL)_' | cut -d= -f1); do unset $name; done"
"""Removes the variables that makers give to every program of a box. Some are secrets."""
KILLED = 137
FETCHES = 4


class Remote:
    """A sandbox on other machines. Implements `Sandbox`, and has boxes too."""

    def __init__(self, limits: SandboxSection) -> None:
        self._limits = limits
        self._maker = MAKERS[limits.kind]

    def check(self) -> None:
        """Makes a box and ends it, on a thread of its own, because there may be a loop already."""
        self._maker.client(self._limits.kind)
        try:
            with ThreadPoolExecutor(1) as thread:
                ran = thread.submit(asyncio.run, self.run(["true"])).result()
        except SandboxLost as lost:
            raise SandboxUnavailable(
                f"{lost} For environment.sandbox.kind = {self._limits.kind!r}: "
                f"{self._maker.remedy}."
            ) from lost
        if not ran.ok:
            raise SandboxUnavailable(
                f"environment.sandbox: in a box of {self._limits.kind} even `true` fails "
                f"({ran.stderr[-300:]}); see its image."
            )

    async def python(
        self, code: str, *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> ProgramResult:
        return await self.run(
            ["python3", "-I", "-B", "main.py"], files={**files, "main.py": code}, stdin=stdin
        )

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> ProgramResult:
        given = {f"{WORK}/{name}": data for name, data in checked(files).items()}
        life = self._limits.seconds + 2 * self._limits.start_seconds
        async with self._opened(BoxSetup(start=WORK, seconds=life)) as box:
            return await box.run(command, files=given, stdin=stdin)

    @asynccontextmanager
    async def opened(self, furnished: BoxSetup) -> AsyncGenerator[Box]:
        life = furnished.seconds + self._limits.start_seconds
        async with self._opened(replace(furnished, seconds=life)) as box:
            if furnished.folders or furnished.files:
                await box.run(["mkdir", "-p", *furnished.folders], files=furnished.files)
            yield box

    @asynccontextmanager
    async def _opened(self, furnished: BoxSetup) -> AsyncGenerator["RemoteBox"]:
        stack = AsyncExitStack()
        making = asyncio.create_task(
            stack.enter_async_context(self._maker.box(self._limits, furnished))
        )
        try:
            async with _blamed(f"making a box of {self._limits.kind}", self._limits.start_seconds):
                shell = await asyncio.shield(making)
            yield RemoteBox(shell, self._limits, start=furnished.start)
        finally:
            ending = asyncio.create_task(_ended(making, stack, self._limits.start_seconds))
            _endings.add(ending)
            ending.add_done_callback(_endings.discard)
            await asyncio.shield(ending)


class RemoteBox:
    """A box on another machine. Implements `Box`. A program's output goes into files of the box, of
    which no more is fetched than the limit.
    """

    def __init__(self, shell: Shell, limits: SandboxSection, *, start: str) -> None:
        self._run = shell
        self._limits = limits
        self._start = start
        self._answer_seconds = ANSWER_SHARE * limits.start_seconds
        self._held_seconds = HELD_SHARE * limits.start_seconds

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = {},
        stdin: str = "",
        seconds: float | None = None,
    ) -> ProgramResult:
        limit = math.ceil(seconds or self._limits.seconds)
        await self._put({**files, f"{HERE}/in": stdin})
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(limit + self._held_seconds):
                longest = limit + self._held_seconds + self._answer_seconds
                status, _ = await self._shell(self._script(command, limit), longest)
        except TimeoutError:  # nothing answers, or the program holds up its own bounds
            await self._shell("true", self._answer_seconds)
            status = KILLED
        took = loop.time() - began
        out = await self._fetched("out", OUTPUT_BYTES + 1)
        err = await self._fetched("err", OUTPUT_BYTES + 1)
        ended: Ended | None = None
        if max(len(out), len(err)) > OUTPUT_BYTES:
            ended = "output"
        elif status == KILLED and took >= limit:
            ended = "time"
        elif status == KILLED and await self._ran_out():
            ended = "memory"
        return ProgramResult(
            None if ended else _signed(status),
            out[:OUTPUT_BYTES].decode(errors="replace"),
            err[:OUTPUT_BYTES].decode(errors="replace"),
            took,
            ended,
        )

    def _script(self, command: Sequence[str], seconds: int) -> str:
        limits = self._limits
        start = shlex.quote(self._start)
        memory = limits.memory_mb * 1024
        disk = limits.disk_mb * 2048
        lines = [
            f"mkdir -p {start} && cd {start} || exit 125",
            FORGET,
            f"ulimit -c 0; ulimit -v {memory}; ulimit -f {disk}",
            f"timeout -s KILL {seconds} {shlex.join(command)} <{HERE}/in >{HERE}/out 2>{HERE}/err",
            "exit $?",
        ]
        return "\n".join(lines)

    async def _put(self, files: Mapping[str, str | bytes]) -> None:
        archive = base64.b64encode(gzip.compress(packed(files))).decode()
        script = f"mkdir -p {HERE} && : >{HERE}/given"
        for begin in range(0, len(archive), CHUNK):
            chunk = archive[begin : begin + CHUNK]
            await self._done(f"{script} && printf %s {chunk} >>{HERE}/given")
            script = "true"
        await self._done(f"base64 -d <{HERE}/given | gzip -d | tar -x -o -m -f - -C /")

    async def _fetched(self, name: str, most: int) -> bytes:
        """Fetches at most `most` bytes of the output. A client may give an answer with a part
        missing and without an error: Docker's skips the bytes that come along with the head of the
        answer.
        """
        for _ in range(FETCHES):
            _, said = await self._shell(
                f"echo '<'; head -c {most} {HERE}/{name} | base64; echo '>'", self._answer_seconds
            )
            if said.startswith("<") and said.rstrip().endswith(">"):
                return base64.b64decode(said.strip()[1:-1])
        raise SandboxLost(
            "fetching what a program wrote in a box failed: its maker's answers were incomplete."
        )

    async def _done(self, script: str) -> None:
        status, _ = await self._shell(script, self._answer_seconds)
        if status:
            raise SandboxLost(
                "putting files into a box failed; it needs mkdir, base64, gzip and tar, room for "
                "them, and a user who may write there."
            )

    async def _shell(self, script: str, seconds: float) -> tuple[int, str]:
        """Runs a script as `Shell` does. Raises `SandboxLost` if the maker gives no answer, and
        `TimeoutError` if that takes longer than the caller waits.
        """
        async with _blamed("running a program in a box", seconds):
            return await self._run(script, seconds)

    async def _ran_out(self) -> bool:
        """True if the kernel has ended a process of the box because of its memory. It is False if
        the kernel does not report that.
        """
        _, said = await self._shell(
            "sed -n 's/^oom_kill //p' /sys/fs/cgroup/memory.events 2>/dev/null || true",
            self._answer_seconds,
        )
        return said.strip() not in ("", "0")


_endings = set[asyncio.Task[None]]()
"""Tasks are kept here, because a loop does not keep its tasks."""


async def _ended(making: asyncio.Task[Shell], stack: AsyncExitStack, start_seconds: float) -> None:
    """Waits for a box that is being made, because nothing else knows its name, and then for its
    end.
    """
    with suppress(Exception):  # its maker ends it
        async with asyncio.timeout(start_seconds):
            await making
    with suppress(Exception):
        async with asyncio.timeout(ANSWER_SHARE * start_seconds):
            await stack.aclose()


def _signed(status: int) -> int:
    """The status as a process gives it: below 0 it is the number of a signal."""
    return 128 - status if 128 < status <= 192 else status


@asynccontextmanager
async def _blamed(deed: str, seconds: float) -> AsyncGenerator[None]:
    """Turns every error of a maker's client into `SandboxLost`, because it says nothing about the
    program. These errors have no common class.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            yield
    except MidflightError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if deadline.expired():
            why = (
                f"no answer within {seconds:g} s (raise environment.sandbox.start_seconds if it is "
                "only slow)"
            )
        raise SandboxLost(f"{deed} failed: {why:.1000}.") from error
