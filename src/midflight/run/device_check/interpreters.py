"""The interpreters of servers on this machine. It needs no torch."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from midflight.run.launcher.checks.engines import SERVERS

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def interpreter(kind: str) -> Path | None:
    """The Python of an environment that has the server: the one that its variable names, else that
    of `make engines`, else this one. None if there is none.
    """
    named = os.environ.get(SERVERS[kind])
    for path in (named, f".venv-{kind}/bin/python"):
        if path and os.access(path, os.X_OK):
            return Path(path).absolute()
    return Path(sys.executable) if find_spec(kind) is not None else None


def why_absent(kind: str) -> str:
    """The reason why such a server cannot be tried. Empty if it is here."""
    if interpreter(kind) is not None:
        return ""
    return f"{NAMES[kind]} is not here: make engines, or name its interpreter in {SERVERS[kind]}"
