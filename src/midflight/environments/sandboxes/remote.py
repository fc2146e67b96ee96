"""Programs in boxes on other machines: whoever makes the box, what is run in it, and how it is
bounded, is the same.
"""

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
from midflight.environments.sandboxes.port import Box, Ended, Furnished, Ran, checked, packed
from midflight.errors import MidflightError, SandboxLost, SandboxUnavailable

HERE = "/tmp/.midflight"
WORK = "/tmp/sandbox"
ANSWER_SHARE = 0.2
"""A maker has this share of `start_seconds` for each answer."""
HELD_SHARE = 0.1
"""A program has this share of `start_seconds` to end after its limit. Then its box is asked for a
sign.
"""
CHUNK = 45_000
"""Characters of an archive in one command: Modal takes 64 KiB of arguments."""
FORGET = "for name in $(env | grep -E '^(E2B|DAYTONA|MODAL)_' | cut -d= -f1); do unset $name; done"
"""Variables that makers give to every program of a box. Some are secrets."""
KILLED = 137
FETCHES = 4


class Remote:
    """Implements `LastingSandbox`."""

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
    ) -> Ran:
        return await self.run(
            ["python3", "-I", "-B", "main.py"], files={**files, "main.py": code}, stdin=stdin
        )

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> Ran:
        given = {f"{WORK}/{name}": data for name, data in checked(files).items()}
        life = self._limits.seconds + 2 * self._limits.start_seconds
        async with self._opened(Furnished(start=WORK, seconds=life)) as box:
            return await box.run(command, files=given, stdin=stdin)

    @asynccontextmanager
    async def opened(self, furnished: Furnished) -> AsyncGenerator[Box]:
        async with self._opened(
            replace(furnished, seconds=furnished.seconds + self._limits.start_seconds)
        ) as box:
            if furnished.folders or furnished.files:
                await box.run(["mkdir", "-p", *furnished.folders], files=furnished.files)
            yield box

    @asynccontextmanager
    async def _opened(self, furnished: Furnished) -> AsyncGenerator["RemoteBox"]:
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
    """Implements `Box`. What a program writes goes into files of the box, of which no more is
    fetched than may be.
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
    ) -> Ran:
        limit = math.ceil(seconds or self._limits.seconds)
        await self._put({**files, f"{HERE}/in": stdin})
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(limit + self._held_seconds):
                status = (
                    await self._shell(
                        self._script(command, limit),
                        limit + self._held_seconds + self._answer_seconds,
                    )
                )[0]
        except TimeoutError:  # nobody answers, or the program holds up what bounds it
            await self._shell("true", self._answer_seconds)
            status = KILLED
        took = loop.time() - began
        most = self._limits.output_bytes
        out, err = [await self._fetched(name, most + 1) for name in ("out", "err")]
        ended: Ended | None = "output" if max(len(out), len(err)) > most else None
        if status == KILLED and ended is None:
            ended = "time" if took >= limit else "memory" if await self._ran_out() else None
        return Ran(
            None if ended else _signed(status),
            out[:most].decode(errors="replace"),
            err[:most].decode(errors="replace"),
            took,
            ended,
        )

    def _script(self, command: Sequence[str], seconds: int) -> str:
        limits = self._limits
        start = shlex.quote(self._start)
        return "\n".join(
            (
                f"mkdir -p {start} && cd {start} || exit 125",
                FORGET,
                (
                    f"ulimit -c 0; ulimit -v {limits.memory_mb * 1024}; ulimit -f "
                    f"{limits.disk_mb * 2048}"
                ),
                (
                    f"timeout -s KILL {seconds} {shlex.join(command)} <{HERE}/in >{HERE}/out "
                    f"2>{HERE}/err"
                ),
                "exit $?",
            )
        )

    async def _put(self, files: Mapping[str, str | bytes]) -> None:
        archive = base64.b64encode(gzip.compress(packed(files))).decode()
        script = f"mkdir -p {HERE} && : >{HERE}/given"
        for begin in range(0, len(archive), CHUNK):
            await self._done(
                f"{script} && printf %s {archive[begin : begin + CHUNK]} >>{HERE}/given"
            )
            script = "true"
        await self._done(f"base64 -d <{HERE}/given | gzip -d | tar -x -o -m -f - -C /")

    async def _fetched(self, name: str, most: int) -> bytes:
        """So many bytes of what was written. What a client gives of an answer may lack a part
        without a word: Docker's reads past what has come along with the head of the answer."""
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
        if (await self._shell(script, self._answer_seconds))[0]:
            raise SandboxLost(
                "putting files into a box failed; it needs mkdir, base64, gzip and tar, room for "
                "them, and a user who may write there."
            )

    async def _shell(self, script: str, seconds: float) -> tuple[int, str]:
        """As `Shell`. `SandboxLost` where the maker gives no answer, `TimeoutError` where that
        takes longer than the caller waits.
        """
        async with _blamed("running a program in a box", seconds):
            return await self._run(script, seconds)

    async def _ran_out(self) -> bool:
        """Whether the kernel has ended something of the box for its memory; where it does not say,
        nothing was.
        """
        _, said = await self._shell(
            "sed -n 's/^oom_kill //p' /sys/fs/cgroup/memory.events 2>/dev/null || true",
            self._answer_seconds,
        )
        return said.strip() not in ("", "0")


_endings = set[asyncio.Task[None]]()
"""Kept here, because a loop does not keep its tasks."""


async def _ended(making: asyncio.Task[Shell], stack: AsyncExitStack, start_seconds: float) -> None:
    """Waits for a box that is being made, whoever has gone meanwhile, because nobody else knows its
    name; then for its end.
    """
    with suppress(Exception):  # its maker ends it
        async with asyncio.timeout(start_seconds):
            await making
    with suppress(Exception):
        async with asyncio.timeout(ANSWER_SHARE * start_seconds):
            await stack.aclose()


def _signed(status: int) -> int:
    """As a process says it: below 0 the number of a signal."""
    return 128 - status if 128 < status <= 192 else status


@asynccontextmanager
async def _blamed(deed: str, seconds: float) -> AsyncGenerator[None]:
    """Whatever a maker's client raises, of classes that have nothing in common, is `SandboxLost`:
    it says nothing about the program.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            yield
    except MidflightError:
        raise
    except Exception as error:
        why = (
            (
                f"no answer within {seconds:g} s (raise environment.sandbox.start_seconds if it is "
                "only slow)"
            )
            if deadline.expired()
            else f"{type(error).__name__}: {error}"
        )
        raise SandboxLost(f"{deed} failed: {why:.1000}.") from error
