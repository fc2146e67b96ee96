"""One child process, seen from the launcher: started, told its spec, listened to, stopped. Torch-free."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from midflight.errors import RunFailed
from midflight.run.launcher.endpoint import TOKEN_VARIABLE
from midflight.run.messages import Message, Part, Spec, decode_message, encode


class Child:
    """A part of the run in a process of its own.

    It imports what it needs as soon as it is started and waits for its spec on standard input; messages come back as JSON
    lines. Everything it prints goes to its log. It lives in its own session, so that a Ctrl-C in the terminal reaches the
    launcher alone, and dies with the launcher.
    """

    def __init__(
        self,
        part: Part,
        name: str,
        *,
        log: Path,
        environ: Mapping[str, str],
        sockets: Sequence[socket.socket] = (),
        arguments: Sequence[str] = (),
    ) -> None:
        self.part, self.name, self.log, self._arguments = part, name, log, tuple(arguments)
        self._environ, self._sockets = environ, tuple(sockets)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "midflight.run.launcher.child", self.part, *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**{name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}, **self._environ},
                pass_fds=[s.fileno() for s in self._sockets],
                start_new_session=True,
                limit=2**24,
            )

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def tell(self, spec: Spec) -> None:
        """Sends the spec. Waits for the pipe only; ended by the child reading it or dying."""
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(ConnectionError):
            stdin.write(encode(spec) + b"\n")
            await stdin.drain()

    async def messages(self) -> AsyncIterator[Message]:
        """Everything the child says, in order; ends when it closes its end, which it does at the latest by dying."""
        stdout = self.process.stdout
        assert stdout is not None
        while line := await stdout.readline():
            yield decode_message(line)

    async def ended(self) -> int:
        """Waits for the exit status; ended by the child."""
        return await self.process.wait()

    def died(self, status: int) -> RunFailed:
        """The error for an end that nobody asked for, with the last lines of its log."""
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        lines = self.log.read_text(errors="replace").splitlines()[-20:] if self.log.exists() else []
        return RunFailed(f"{self.name} ended with {how}; the end of {self.log}:\n" + "\n".join(lines))

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)  # Not by asyncio's own, which may take the exit status from the one who waits for it.


async def stop_all(children: Sequence[Child], *, seconds: float) -> None:
    """Asks every child to end, and kills those that have not after `seconds`. Nothing is left running (I9)."""
    live = [child for child in children if child.running]
    for child in live:
        child.signal(signal.SIGTERM)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for child in live:
                    await child.ended()
    finally:  # a cancellation does not wait, and leaves nothing either
        for child in live:
            child.signal(signal.SIGKILL)
    for child in live:
        await child.ended()
