"""The entry of every child process: `python -m midflight.run.launcher.child PART`, behind it the environment's name, or the engine's kind.

It reads one spec from standard input, runs its part until that ends or the launcher asks it to, and reports a failure with
its traceback. It never outlives the launcher.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import uvloop

from midflight.errors import ConfigError, RunFailed, StoreFailed, first_error
from midflight.run.messages import EngineSpec, Failed, Launcher, Part, RolloutSpec, Spec, TrainerSpec, Verdict, decode_spec
from midflight.run.parts import PartLost, ServerLost

STOP_SECONDS = 2.5
"""A child that was asked to end and hangs is gone after this, so that the launcher keeps its five seconds."""

GC_THRESHOLD = 50_000
"""Allocations between two collections: one request of an agent makes thousands of objects, nearly all freed by counting."""


def die_with_parent() -> None:
    """Linux ends this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def part_main(part: Part, arguments: Sequence[str]) -> Callable[[Any, Launcher], Awaitable[None]]:
    """Imports a part, which for trainer and embedded engine means torch. Done before the spec is known: it takes seconds.

    The environment comes with the rollout process: one that cannot be imported is found now, not after the warm start.
    """
    if part is Part.ENGINE and list(arguments) == ["embedded"]:
        from midflight.run.engine.engine_process import run_engine

        return run_engine
    if part is Part.ENGINE:
        from midflight.run.engine.companion import run_companion

        return run_companion
    if part is Part.ROLLOUT:
        from midflight.environments.registry import load_environment
        from midflight.run.rollout.rollout_process import run_rollout

        for entry in arguments:
            load_environment(entry)
        return run_rollout
    from midflight.run.trainer.trainer_process import run_trainer

    return run_trainer


async def run_until_asked(run: Callable[[Spec, Launcher], Awaitable[None]], spec: Spec, launcher: Launcher) -> None:
    """Runs the part as the main task; SIGTERM and SIGINT cancel it. Ended by the part or by the launcher.

    A failure is told here, before threads that still compute are waited for (I9).
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, task)
    try:
        await run(spec, launcher)
    except Exception as error:
        launcher.tell(failure_of(error))
        raise


def failure_of(error: BaseException) -> Failed:
    """What the launcher must know of it; the traceback goes to the log as well."""
    traceback.print_exception(error)
    first = first_error(error)
    trace = "".join(traceback.format_exception(error))
    match first:
        case ConfigError():
            return Failed(str(first), trace, Verdict.CONFIG)
        case RunFailed() | StoreFailed():
            return Failed(str(first), trace, Verdict.FINAL)
        case PartLost():
            return Failed(str(first), trace, Verdict.LOST)
        case ServerLost():
            return Failed(str(first), "", Verdict.CRASH)
        case _:
            return Failed(f"{type(first).__name__}: {first}", trace, Verdict.CRASH)


def stop(task: asyncio.Task[None]) -> None:
    """Asked to end: what hangs then ends with the process."""
    task.cancel()
    timer = threading.Timer(STOP_SECONDS, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


def main() -> int:
    die_with_parent()
    part = Part(sys.argv[1])
    launcher = Launcher()
    gc.set_threshold(GC_THRESHOLD)  # before the imports, of which collections would be a fifth
    try:
        run = part_main(part, sys.argv[2:])
    except Exception as error:
        launcher.tell(failure_of(error))
        return 1
    try:
        line = sys.stdin.buffer.readline()
        if not line:
            return 0
        spec = decode_spec(line)
        assert isinstance(spec, {Part.ENGINE: EngineSpec, Part.ROLLOUT: RolloutSpec, Part.TRAINER: TrainerSpec}[part])
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that still compute must not keep a stopped part alive
