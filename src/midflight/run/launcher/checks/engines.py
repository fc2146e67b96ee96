"""Checks of the servers of other people: the interpreter that a run starts one with, and those that
are here.
"""

import os
import sys
from collections.abc import Iterator

from midflight.run.launcher.checks.check import Finding, Plan, ok, warning
from midflight.run.launcher.trial import STALL_SECONDS, TrialFailed, TrialWait, answer_of

SERVERS = {"vllm": "MIDFLIGHT_VLLM_PYTHON", "sglang": "MIDFLIGHT_SGLANG_PYTHON"}
"""Servers of other people, and the variable that names the interpreter of each."""


def interpreter(plan: Plan) -> None:
    """Raises `ConfigError` unless the interpreter of a server that the run starts is there."""
    if plan.config.engine.kind != "embedded":
        from midflight.run.engine.server_process import check_interpreter

        check_interpreter(plan.config.engine)


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
