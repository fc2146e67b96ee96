"""A sandbox without isolation, for code that is trusted. Programs run as this user, with limits, in
a folder of their own and without our environment.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from midflight.config.agents import SandboxSection
from midflight.environments.sandboxes.memory import resident
from midflight.environments.sandboxes.port import PYTHON, LimitedProcess, ProgramResult, checked
from midflight.environments.sandboxes.processors import processor_for


class Trusted:
    """Implements `Sandbox`."""

    def __init__(self, limits: SandboxSection) -> None:
        self._limits = limits

    def check(self) -> None:
        """There is nothing to try."""

    async def python(
        self, code: str, *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> ProgramResult:
        return await self.run(PYTHON, files={**files, "main.py": code}, stdin=stdin)

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str | bytes] = {}, stdin: str = ""
    ) -> ProgramResult:
        async with processor_for(network=self._limits.network):
            return await self._ended(command, checked(files), stdin)

    async def _ended(
        self, command: Sequence[str], files: Mapping[str, bytes], stdin: str
    ) -> ProgramResult:
        most = self._limits.memory_mb * 2**20
        words = [
            "prlimit",
            f"--as={most}",
            f"--fsize={self._limits.disk_mb * 2**20}",
            f"--cpu={max(1, round(self._limits.seconds))}",
            "--core=0",
            "--",
        ]
        with tempfile.TemporaryDirectory(prefix="midflight-") as folder:
            for name, data in files.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            process = await asyncio.create_subprocess_exec(
                *words,
                *command,
                cwd=folder,
                env={"PATH": f"{sys.prefix}/bin:{os.defpath}", "HOME": folder, "LANG": "C.UTF-8"},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                preexec_fn=os.setpgrp,  # uvloop has no `process_group`
            )
            limited = LimitedProcess(
                process,
                self._limits,
                held=lambda: resident(process.pid),
                kill=lambda: _kill(process.pid),
            )
            return await limited.ended(stdin)


def _kill(pid: int) -> None:
    """Ends the process group, and with it the processes that were left behind there. The session is
    that of the worker. The worker's guard ends the processes that a worker leaves.
    """
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
