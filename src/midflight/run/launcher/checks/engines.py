"""Checks of the servers of other people: the interpreter that a run starts one with, and those that
are here.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import closing

from midflight.config.derived import engine_python
from midflight.config.engine import EngineSection
from midflight.errors import ConfigError, RunFailed
from midflight.run.launcher.checks.check import Finding, Plan, ok, warning
from midflight.run.launcher.shutdown import main_task
from midflight.run.launcher.trial import (
    STALL_SECONDS,
    TrialFailed,
    TrialWait,
    answer_of,
    to_terminal,
)
from midflight.run.reminder import Reminder

SERVERS = {"vllm": "MIDFLIGHT_VLLM_PYTHON", "sglang": "MIDFLIGHT_SGLANG_PYTHON"}
"""Servers of other people, and the variable that names the interpreter of each."""


PROBE_PACKAGE = """
import importlib.util, sys
print("there" if importlib.util.find_spec(sys.argv[1]) else "absent")
"""


def interpreter(plan: Plan) -> None:
    """Raises `ConfigError` unless the interpreter of a server that the run starts is there, and has
    the server. A program that is no Python, such as a script around one, is not asked further.
    """
    engine = plan.config.engine
    if engine.kind == "embedded":
        return
    from midflight.run.engine.server_process import check_interpreter

    check_interpreter(engine)
    if engine.urls:
        return
    path = engine_python(engine).absolute()
    waiting = TrialWait(f"looking for {engine.kind}", plan.config.run.stall_seconds)
    try:
        said = answer_of([str(path), "-c", PROBE_PACKAGE, engine.kind], waiting)
    except TrialFailed:
        return
    if said == b"absent":
        raise ConfigError(
            f"starting {engine.kind}: it is not installed for {path}; run `make engines`, which "
            "installs vLLM and SGLang, or set engine.python to the interpreter of an environment "
            "that has it."
        )


def attached(plan: Plan) -> None:
    """Raises `ConfigError` unless the servers of `engine.urls` answer. They have the time that the
    run gives them, `engine.start_seconds`. A cluster's machines may reach what this one does not.
    """
    engine = plan.config.engine
    if not engine.urls or plan.config.cluster.kind != "local":
        return
    lost: list[str] = []
    if main_task(_ask_all(engine, lost)) != 0:
        raise KeyboardInterrupt
    if lost:
        raise ConfigError("\n".join(lost))


async def _ask_all(engine: EngineSection, lost: list[str]) -> None:
    """Asks each server, and adds a sentence to `lost` for each that does not answer. Waits for
    `engine.start_seconds` at most.
    """
    from midflight.run.engine.server_process import attached as asked

    waiting = list(engine.urls)

    async def ask(number: int, url: str) -> None:
        try:
            async with asked(engine, url, name=f"engine{number}"):
                pass
        except RunFailed as failed:
            lost.append(str(failed))
        waiting.remove(url)

    def say_waiting(passed: float) -> None:
        to_terminal(
            f"{waiting[0]} (engine.urls) did not answer in {passed:.0f} s, of "
            f"{engine.start_seconds:g} s that engine.start_seconds gives"
        )

    with closing(Reminder(say_waiting)):
        await asyncio.gather(*(ask(number, url) for number, url in enumerate(engine.urls)))


def servers(_: Plan) -> Iterator[Finding]:
    """Yields findings on vLLM and SGLang, if a variable, `make engines` or this environment has
    them.
    """
    for name, variable in SERVERS.items():
        found = None
        for python in (os.environ.get(variable), f".venv-{name}/bin/python", sys.executable):
            if python and os.access(python, os.X_OK):
                found = found or _server(name, python)
        if found is None and os.environ.get(variable):
            yield warning(
                f"engine {name}",
                f"{variable} names {os.environ[variable]}, which has no {name}",
                "correct or unset it",
            )
        elif found is None:
            yield ok(
                f"engine {name}",
                "not here",
                f"where you want it: make engines, or engine.python of an environment with {name}",
            )
        else:
            yield ok(f"engine {name}", found)


def _server(name: str, python: str) -> str | None:
    """Returns the version of a server, and where it is, or None if this interpreter has none."""
    command = [python, "-c", f"from importlib import metadata; print(metadata.version({name!r}))"]
    try:
        version = answer_of(command, TrialWait(f"looking for {name} in {python}", STALL_SECONDS))
    except (TrialFailed, OSError):
        return None
    return f"{version.decode()} at {python}"
