"""A part of the run in a process of its own, from both ends: `Child` in the launcher, and `main` in the process. Torch-free until a part runs.

`python -m midflight.run.launcher.child PART`, behind it the environment's name or the engine's kind, reads objects of the program that
started the run and one spec from standard input, runs the part until that ends or the launcher asks it to, and reports a failure with its traceback. It never outlives the launcher.
"""

import asyncio
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import uvloop

from midflight import given
from midflight.entries import load_entry
from midflight.errors import ConfigError, MidflightError, RunFailed, StoreFailed, disk_full, every_error, first_error
from midflight.observe import logs
from midflight.run import parts
from midflight.run.heart import START_SECONDS
from midflight.run.parts import TOKEN_VARIABLE

STACKS_SECONDS = 1.0
"""For a process to write its stacks into its log, on a busy machine too."""
STACKS_SIGNAL = signal.SIGUSR1
STOP_SECONDS = 2.5
"""A child that was asked to end and hangs is gone after this, so that the launcher keeps its five seconds."""

MAX_STACKS = 20_000
"""Bytes of stacks that are shown; a hundred threads make more, and are in the log."""

MAX_LOG_BYTES, KEPT_LOG_BYTES = 64 * 2**20, 2**20
"""A log that grows beyond the first, by what agents print for instance, is cut down to the last of it."""

GC_THRESHOLD = 50_000
"""Allocations between two collections: one request of an agent makes thousands of objects, nearly all freed by counting."""


class HasDescriptor(Protocol):
    """A socket, or an open file."""

    def fileno(self) -> int: ...


class PartFailed(RunFailed):
    """A process ended that should not have, and a restart may help."""

    def __init__(self, message: str, *, part: str) -> None:
        super().__init__(message)
        self.part = part


# --- In the launcher -------------------------------------------------------------------------------------------------


class Child:
    """A part of the run in a process of its own.

    It imports what it needs as soon as it is started and waits for its spec on standard input; messages come back as JSON
    lines. Everything it prints goes to its log. It lives in its own session, so that a Ctrl-C in the terminal reaches the
    launcher alone, and dies with the launcher.
    """

    def __init__(
        self,
        part: parts.ProcessKind,
        name: str,
        *,
        log: Path,
        environ: Mapping[str, str],
        inherited: Sequence[HasDescriptor] = (),
        arguments: Sequence[str] = (),
        objects: bytes = given.NOTHING,
    ) -> None:
        """`inherited`: sockets and files that it gets under their numbers. `objects`: what the program gives to its run, packed."""
        self._objects = objects
        self.part, self.name, self.log, self._arguments = part, name, log, tuple(arguments)
        self._environ, self._inherited = environ, tuple(inherited)
        self._process: asyncio.subprocess.Process | None = None
        self._hung: str | None = None

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "midflight.run.launcher.child", self.part, *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**{name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}, **self._environ},
                pass_fds=[file.fileno() for file in self._inherited],
                start_new_session=True,
                limit=2**24,
            )
        await self._write(self._objects)

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def was_started(self) -> bool:
        """Unless that was cut short."""
        return self._process is not None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def tell(self, spec: parts.Spec) -> None:
        """Sends the spec. Waits for the pipe only; ended by the child reading it or dying."""
        await self._write(parts.encode(spec) + b"\n")

    async def _write(self, data: bytes) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(ConnectionError):
            stdin.write(data)
            await stdin.drain()

    async def messages(self) -> AsyncIterator[parts.Message]:
        """Everything the child says, in order; ends when it closes its end, which it does at the latest by dying."""
        stdout = self.process.stdout
        assert stdout is not None
        while line := await stdout.readline():
            yield parts.decode_message(line)

    async def ended(self) -> int:
        """Waits for the exit status; ended by the child."""
        return await self.process.wait()

    async def stacks(self) -> str:
        """The Python stacks of its threads as they are now, which go to its log too. Waits for it to write them, a fixed time."""
        before = self.log.stat().st_size
        self.signal(STACKS_SIGNAL)
        await asyncio.sleep(STACKS_SECONDS)
        with self.log.open("rb") as log:
            log.seek(before)
            return log.read(MAX_STACKS).decode(errors="replace")

    def cut_log(self) -> None:
        """The process goes on writing at its end: it is open for appending."""
        with suppress(OSError), self.log.open("r+b") as log:
            if (size := log.seek(0, os.SEEK_END)) > MAX_LOG_BYTES:
                log.seek(size - KEPT_LOG_BYTES)
                last = log.read()
                log.truncate(0)
                log.seek(0)
                log.write(b"(what was here before grew too long and was cut)\n" + last)

    def condemn(self, why: str) -> None:
        """Ends it at once, for a reason that is then said to be that of its end."""
        self._hung = why
        self.signal(signal.SIGKILL)

    def died(self, status: int) -> PartFailed:
        """The error for an end that nobody asked for, with the last lines of its log."""
        if self._hung is not None:
            return PartFailed(f"{self._hung}. It was ended.", part=self.name)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        lines = self.log.read_text(errors="replace").splitlines()[-20:] if self.log.exists() else []
        return PartFailed(f"{self.name} ended with {how}; the end of {self.log}:\n" + "\n".join(lines), part=self.name)

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            with suppress(ProcessLookupError):
                # Not by asyncio's own, which may take the exit status from the task that waits for it. A worker's agents may have children.
                (os.killpg if self.part is parts.ProcessKind.WORKER else os.kill)(self.pid, number)

    def end_group(self) -> None:
        """Ends what it has started and left behind. To be called when it has just ended, while no other process can have its number."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


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


def error_of(name: str, said: parts.Failed) -> MidflightError:
    """The launcher's error for a part's last words: what a user can mend is one message, a crash has its traceback (I9)."""
    match said.verdict:
        case parts.Verdict.CONFIG:
            return ConfigError(said.error)
        case parts.Verdict.FINAL:
            return RunFailed(said.error)
        case parts.Verdict.LOST:
            return parts.PartLost(f"{name}: {said.error}")
        case parts.Verdict.CRASH:
            return PartFailed(f"{name} failed: {said.error}\n{said.traceback}".rstrip(), part=name)


# --- In the process --------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Linux ends this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def part_main(part: parts.ProcessKind, arguments: Sequence[str]) -> Callable[[Any, parts.Launcher], Awaitable[None]]:
    """Imports a part, which for trainer and embedded engine means torch. Done before the spec is known: it takes seconds.

    What `[environment]` names comes with the process that runs agents: one that cannot be imported is found now, not after the warm start.
    """
    if part is parts.ProcessKind.ENGINE and list(arguments) == ["embedded"]:
        from midflight.run.engine.engine_process import run_engine

        return run_engine
    if part is parts.ProcessKind.ENGINE:
        from midflight.run.engine.companion import run_companion

        return run_companion
    for entry in arguments:
        load_entry(entry, option="environment", such_as="my_module:function")
    if part is parts.ProcessKind.WORKER:
        from midflight.run.worker.worker_process import run_worker

        return run_worker
    if part is parts.ProcessKind.ROLLOUT:
        from midflight.run.rollout.rollout_process import run_rollout

        return run_rollout
    from midflight.run.trainer.trainer_process import run_trainer

    return run_trainer


async def run_until_asked(run: Callable[[parts.Spec, parts.Launcher], Awaitable[None]], spec: parts.Spec, launcher: parts.Launcher) -> None:
    """Runs the part as the main task; SIGTERM and SIGINT cancel it. Ended by the part or by the launcher.

    A failure is told here, before threads that still compute are waited for (I9).
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, task)
    launcher.heart.turn()
    try:
        await run(spec, launcher)
    except Exception as error:
        end_soon(1)
        report(error, launcher)
        raise
    end_soon(0)  # what agents left behind may refuse to end


def report(error: BaseException, launcher: parts.Launcher) -> None:
    """The launcher is told first: the log may be on a full disk."""
    launcher.tell(failure_of(error))
    with suppress(OSError):
        logs.log_failure(error)


def failure_of(error: BaseException) -> parts.Failed:
    """What the launcher must know of it. Of errors that came together, one that a restart cannot mend says most."""
    said = [_verdict(one) for one in every_error(error)]
    verdict, message = next((one for one in said if one[0] in (parts.Verdict.CONFIG, parts.Verdict.FINAL)), said[0])
    trace = "" if isinstance(first_error(error), parts.ServerLost) else "".join(traceback.format_exception(error))
    return parts.Failed(message, trace, verdict)


def _verdict(error: BaseException) -> tuple[parts.Verdict, str]:
    if not isinstance(error, MidflightError) and (full := disk_full(error)) is not None:
        return parts.Verdict.FINAL, str(full)
    match error:
        case ConfigError():
            return parts.Verdict.CONFIG, str(error)
        case RunFailed() | StoreFailed():
            return parts.Verdict.FINAL, str(error)
        case parts.PartLost():
            return parts.Verdict.LOST, str(error)
        case parts.ServerLost():
            return parts.Verdict.CRASH, str(error)
        case _:
            return parts.Verdict.CRASH, f"{type(error).__name__}: {error}"


def stop(task: asyncio.Task[None]) -> None:
    """Asked to end: what hangs then ends with the process."""
    task.cancel()
    end_soon(1)


def end_soon(status: int) -> None:
    """The process ends after `STOP_SECONDS`, whatever hangs."""
    timer = threading.Timer(STOP_SECONDS, os._exit, args=(status,))
    timer.daemon = True
    timer.start()


def main() -> int:
    die_with_parent()
    part = parts.ProcessKind(sys.argv[1])
    launcher = parts.Launcher()
    logs.as_asked()
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr)
    launcher.heart.start()
    gc.set_threshold(GC_THRESHOLD)  # before the imports, of which collections would be a fifth
    try:
        given.read(sys.stdin.buffer)
        with launcher.heart.doing("imports", limit=START_SECONDS, heavy=True):
            run = part_main(part, sys.argv[2:])
    except Exception as error:
        report(error, launcher)
        return 1
    try:
        line = sys.stdin.buffer.readline()
        if not line:
            return 0
        spec = parts.decode_spec(line)
        assert isinstance(
            spec,
            {
                parts.ProcessKind.ENGINE: parts.EngineSpec,
                parts.ProcessKind.ROLLOUT: parts.RolloutSpec,
                parts.ProcessKind.WORKER: parts.WorkerSpec,
                parts.ProcessKind.TRAINER: parts.TrainerSpec,
            }[part],
        )
        gc.freeze()  # modules live as long as the process; only what a run makes is worth looking at
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_until_asked(run, spec, launcher))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM  # not 0: an end that somebody asked for is not the end of the work
    except BaseException:  # told already
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # threads that still compute must not keep a stopped part alive
