"""Processes below this one, among them the parts of a run."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from midflight.run import parts
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.orphan_guard import guarded
from midflight.run.places.port import KILLS, STACKS_SIGNAL, ChildOrder, HasDescriptor, PartFailed

COMMAND = (sys.executable, "-m", "midflight.run.launcher.child")
"""The kind of part follows, and the modules that it is to import."""
STACKS_SECONDS = 1.0
"""The time that a process has to write its stacks into its log, on a busy machine too."""
MAX_STACKS = 20_000
"""The bytes of stacks that are shown. A hundred threads make more, which are in the log."""
MAX_LOG_BYTES = 64 * 2**20
KEPT_LOG_BYTES = 2**20
"""A log that grows beyond `MAX_LOG_BYTES`, by the prints of agents for instance, is cut down to its
last `KEPT_LOG_BYTES`.
"""
LAST_LINES = 25
"""The number of lines of the log that an error shows: a server's traceback is long, and its cause
is not at the end.
"""
KEPT_FROM_CHILDREN = frozenset((TOKEN_VARIABLE, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
"""Variables that give access to the run, or to the cluster that it runs on. Child processes do not
inherit them, because an agent could use them.
"""


class LocalProcess:
    """A process below this one, with a log. It lives in its own session, so that a Ctrl-C in the
    terminal reaches this process alone. Its guard ends all of that session when the process has
    ended, or when this one has.
    """

    def __init__(self, name: str, *, log: Path) -> None:
        self.name = name
        self.log = log
        self._log_began = 0
        """The size of the log when this process was started."""
        self._process: asyncio.subprocess.Process | None = None

    async def launch(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        talks: bool = False,
        inherited: Sequence[HasDescriptor] = (),
        cwd: str | None = None,
        seconds: float | None = None,
    ) -> None:
        """Starts the process, with `environ` as its whole environment. One that `talks` has pipes
        for standard input and output; the output of another goes to its log. `inherited` are
        sockets and files that it gets under their numbers. `cwd` is its working folder, if that is
        not the one of this process. After the end of this process it has `seconds` to end.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch(0o640)  # not to others, also where the launcher's umask does not reach
        with self.log.open("ab") as log:
            self._log_began = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *guarded(command, seconds=seconds),
                stdin=asyncio.subprocess.PIPE if talks else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if talks else log,
                stderr=log,
                env=environ,
                cwd=cwd,
                pass_fds=[file.fileno() for file in inherited],
                start_new_session=True,
                limit=2**24,
            )

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def was_started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> int:
        """Waits for the exit status; ended by the process."""
        return await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends the signal directly. asyncio's own way may take the exit status from the task that
        waits for it.
        """
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def last_lines(self) -> str:
        """The last lines that it has written to its log."""
        return last_lines(self.log, since=self._log_began)

    def how_ended(self, status: int) -> str:
        """A sentence for an end that was not asked for, with the last lines of the log."""
        said = f"{self.name} ended with {of_status(status)}"
        return f"{said}; the end of {self.log}:\n{self.last_lines()}"


class LocalChild(LocalProcess):
    """A `Child` on this machine. It talks in JSON lines on standard input and output."""

    state = "?"

    def __init__(self, order: ChildOrder, *, inherited: Sequence[HasDescriptor] = ()) -> None:
        """`inherited` are sockets and files that the process gets under their numbers."""
        super().__init__(order.name, log=Path(order.log))
        self.part = order.part
        self._order = order
        self._inherited = inherited
        self._hung: str | None = None

    async def start(self) -> None:
        order = self._order
        await self.launch(
            [*COMMAND, order.part, *order.arguments],
            environ=child_environ(order.environ),
            talks=True,
            inherited=self._inherited,
            cwd=order.cwd,
        )
        assert self.process.stdin is not None
        # Not waited for: a process that is stopped reads nothing, and it is watched only once it
        # has started.
        self.process.stdin.write(self._order.objects)

    async def tell(self, spec: parts.Spec) -> None:
        await self.write(parts.encode(spec) + b"\n")

    async def write(self, data: bytes) -> None:
        """Writes to its standard input. Waits as `tell` does."""
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(ConnectionError):
            stdin.write(data)
            await stdin.drain()

    async def messages(self) -> AsyncIterator[parts.Message]:
        stdout = self.process.stdout
        assert stdout is not None
        async for line in stdout:
            yield parts.decode_message(line)

    async def stacks(self) -> str:
        before = self.log.stat().st_size
        self.signal(STACKS_SIGNAL)
        await asyncio.sleep(STACKS_SECONDS)
        with self.log.open("rb") as log:
            log.seek(before)
            return log.read(MAX_STACKS).decode(errors="replace")

    def cut_log(self) -> None:
        """The process goes on writing at its end: it is open for appending."""
        with suppress(OSError), self.log.open("r+b") as log:
            size = log.seek(0, os.SEEK_END)
            if size > MAX_LOG_BYTES:
                log.seek(size - KEPT_LOG_BYTES)
                last = log.read()
                log.truncate(0)
                log.seek(0)
                log.write(b"(what was here before grew too long and was cut)\n" + last)
                self._log_began = 0

    def condemn(self, why: str) -> None:
        self._hung = why
        self.signal(signal.SIGKILL)

    def died(self, status: int) -> PartFailed:
        if self._hung is not None:
            return PartFailed(f"{self._hung}. It was ended.", part=self.name)
        return PartFailed(self.how_ended(status), part=self.name, was_killed=status in KILLS)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal. The processes of a worker's agents are asked to end with the worker, and
        its guard kills the rest when the worker has ended.
        """
        asks_all = self.part is parts.ProcessKind.WORKER and number is signal.SIGTERM
        if asks_all and self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            return
        super().signal(number)


def child_environ(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process without `KEPT_FROM_CHILDREN`, and with what is given."""
    return without_access(os.environ) | dict(given)


def without_access(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without `KEPT_FROM_CHILDREN`."""
    return {name: value for name, value in environ.items() if name not in KEPT_FROM_CHILDREN}


def of_status(status: int) -> str:
    """An exit status in words."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def last_lines(log: Path, *, since: int = 0) -> str:
    """The last lines of a log, after its first `since` bytes."""
    if not log.exists():
        return ""
    lines = log.read_bytes()[since:].decode(errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])
