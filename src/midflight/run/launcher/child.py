"""The main program of a part's own process. It imports no torch until the part is known.

    python -m midflight.run.launcher.child PART [ENTRY ...]      for an engine its kind, not entries

It reads from standard input the objects of the program that started the run, and one spec. It runs
the part until that ends or the launcher asks it to end, and reports a failure with its traceback.
It never outlives the launcher.
"""

import asyncio
import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import uvloop

from midflight import given
from midflight.entries import load_entry
from midflight.errors import (
    ConfigError,
    MidflightError,
    RunFailed,
    StoreFailed,
    disk_full,
    every_error,
    first_error,
)
from midflight.observe import logs
from midflight.observe.memory import tree_bytes
from midflight.run import parts
from midflight.run.heartbeat import START_SECONDS
from midflight.run.launcher.permissions import mask_of
from midflight.run.places.port import STACKS_SIGNAL

STOP_SECONDS = 2.5
"""A child that was asked to end and hangs is gone after this, so that the launcher keeps its five
seconds.
"""

GC_THRESHOLD = 50_000
"""Allocations between two collections: one request of an agent makes thousands of objects, nearly
all freed by counting.
"""

SPECS = {
    parts.ProcessKind.ENGINE: parts.EngineSpec,
    parts.ProcessKind.ROLLOUT: parts.RolloutSpec,
    parts.ProcessKind.WORKER: parts.WorkerSpec,
    parts.ProcessKind.TRAINER: parts.TrainerSpec,
}
"""The type of spec that each kind of process receives."""


def part_main(
    part: parts.ProcessKind, arguments: Sequence[str]
) -> Callable[[Any, parts.LauncherPipe], Awaitable[None]]:
    """Imports a part, which for trainer and embedded engine means torch. This takes seconds, and
    the spec need not be known for it.

    The process that runs agents also imports the entries that `[environment]` names, so an entry
    that cannot be imported is found now, not after the warm start.
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


async def run_until_asked(
    run: Callable[[parts.Spec, parts.LauncherPipe], Awaitable[None]],
    spec: parts.Spec,
    launcher: parts.LauncherPipe,
) -> None:
    """Runs the part as the main task; SIGTERM and SIGINT cancel it. It is ended by the part or by
    the launcher.

    It reports a failure before anything waits for threads that still compute (I9).
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, task)
    launcher.heartbeat.turn()
    try:
        await run(spec, launcher)
    except Exception as error:
        end_soon(1)
        report(error, launcher)
        raise
    end_soon(0)  # processes that agents left may refuse to end


def report(error: BaseException, launcher: parts.LauncherPipe) -> None:
    """Tells the launcher first, because the log may be on a full disk."""
    launcher.tell(failure_of(error))
    with suppress(OSError):
        logs.log_failure(error)


def failure_of(error: BaseException) -> parts.Failed:
    """Returns the message that tells the launcher of an error. If several errors came together, one
    that a restart cannot mend is reported.
    """
    found = [_verdict(one) for one in every_error(error)]
    verdict, message = found[0]
    for one in found:
        if one[0] in (parts.Verdict.CONFIG, parts.Verdict.FINAL):
            verdict, message = one
            break
    trace = ""
    if not isinstance(first_error(error), parts.ServerLost):
        trace = "".join(traceback.format_exception(error))
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
        case parts.ServerLost(was_killed=was_killed):
            return parts.Verdict.KILLED if was_killed else parts.Verdict.CRASH, str(error)
        case _:
            return parts.Verdict.CRASH, f"{type(error).__name__}: {error}"


def stop(task: asyncio.Task[None]) -> None:
    """Cancels the part. If it hangs after that, its process is ended all the same."""
    task.cancel()
    end_soon(1)


def end_soon(status: int) -> None:
    """Ends the process after `STOP_SECONDS`, even if parts of it hang."""
    timer = threading.Timer(STOP_SECONDS, os._exit, args=(status,))
    timer.daemon = True
    timer.start()


class _GroupOfRun(msgspec.Struct):
    share_with_group: str = ""


class _StartConfig(msgspec.Struct):
    run: _GroupOfRun


def _shared_with(config: str) -> str:
    """The group with which a run is shared, from its configuration."""
    return msgspec.json.decode(config, type=_StartConfig).run.share_with_group


def main() -> int:
    part = parts.ProcessKind(sys.argv[1])
    launcher = parts.LauncherPipe()
    if os.environ.get(parts.SEATED_VARIABLE):
        launcher.heartbeat.memory = partial(tree_bytes, os.getpid())
    logs.use_json_logs()
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr)
    launcher.heartbeat.start()
    gc.set_threshold(GC_THRESHOLD)  # before the imports, of which collections would be a fifth
    try:
        given.read(sys.stdin.buffer)
        with launcher.heartbeat.doing("imports", limit=START_SECONDS, heavy=True, computes=True):
            run = part_main(part, sys.argv[2:])
    except Exception as error:
        report(error, launcher)
        return 1
    try:
        line = sys.stdin.buffer.readline()
        if not line:
            return 0
        spec = parts.decode_spec(line)
        assert isinstance(spec, SPECS[part])
        if not isinstance(spec, parts.WorkerSpec):  # which writes nothing of a run's
            os.umask(mask_of(_shared_with(spec.config)))
        # modules live as long as the process; only the objects of a run are worth looking at
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_until_asked(run, spec, launcher))
    except asyncio.CancelledError:
        # not 0: an end on request is not the end of the work
        return 128 + signal.SIGTERM
    except BaseException:  # told already
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # threads that still compute must not keep a stopped part alive
