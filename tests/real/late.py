"""A launcher whose ring is a stand-in: it makes what a run makes before its first step, and then ends in the way that it is told.

`python -m late FOLDER WAY [STEP]`: `config`, `crash`, `system` and `gone` are its own ends; `waits` is for somebody who kills it; `killed` is
SIGKILL, by itself, when it is about to change the file system for the STEP-th time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from midflight.config import load_config
from midflight.errors import ConfigError
from midflight.run.launcher import launch
from midflight.run.launcher.folder import MODELS

CHANGES = frozenset(("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"))


class StandIn:
    memory: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, folder: Path, way: str) -> None:
        self._folder, self._way = folder, way

    async def run(self, purpose: object, *, resume: bool = False) -> None:
        for name in (
            *(f"{model}/config.json" for model in MODELS if model not in ("model", "adapter")),
            "logs/trainer.log",
            "store.sqlite",
        ):
            (self._folder / name).parent.mkdir(exist_ok=True)
            (self._folder / name).write_text("new")
        print("late", flush=True)
        match self._way:
            case "config":
                raise ConfigError("lora.targets matches nothing")
            case "crash":
                raise RuntimeError("crash")
            case "system":
                raise SystemExit(3)
            case "gone":
                os._exit(3)
            case _:
                await asyncio.Event().wait()


def kill_at(step: int) -> None:
    num = 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal num
        writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if event == "os.kill":
            return  # our own
        num += writes or event in CHANGES
        if num > step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)


def main(folder: str, way: str, step: str = "0") -> int:
    config = load_config(None, [f"run.folder={folder}", "run.restarts=0"])
    stand_in: Any = StandIn(Path(folder), "crash" if way == "killed" else way)
    launch.Run._ring = lambda *given, **named: stand_in
    if way == "killed":
        kill_at(int(step))
    return launch.train(config, overwrite=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
