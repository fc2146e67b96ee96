"""The process of one part, as the check sees it. It needs no torch.

| wait | waits for | ended by |
|---|---|---|
| `PartProcess.run` | the lines of the process, then its end | the process; its seconds, after which it ends itself; `GRACE_SECONDS` more, after which it is killed |
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from midflight.errors import ConfigError
from midflight.run.device_check.lanes import PartStart
from midflight.run.device_check.report import CheckedDevice, DeviceTrial, TrialOutcome
from midflight.run.device_check.table import segment_prefix
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.orphan_guard import guarded
from midflight.weights.transports.memory_files import shared_places

GRACE_SECONDS = 10.0
"""The time that a process has beyond its own, to import torch and to write its stacks."""
LAST_LINES = 6
"""Lines of a process's errors that a report shows."""
MAX_LINE_BYTES = 2**24
"""The longest line of a process. A trial's error may be long."""
WRONG = 2
"""The exit status if there is no such device."""


@dataclass(frozen=True, slots=True)
class PartProcess:
    """The process of one part."""

    device: str
    scratch: Path
    start: PartStart
    seconds: float

    async def run(self, tell: Callable[[CheckedDevice | DeviceTrial], None]) -> None:
        """Tells each thing that it says. An end that is none of its own is one more trial, which
        failed. What the part has left in shared memory is removed. Raises `ConfigError` if there is
        no such device.
        """
        with tempfile.TemporaryFile() as errors:
            process = await self._start(errors)
            is_late = False
            try:
                async with asyncio.timeout(self.seconds + GRACE_SECONDS):
                    await _read_all(process, tell)
            except TimeoutError:
                is_late = True
            finally:
                if process.returncode is None:
                    process.kill()
            status = await process.wait()
            remove_shared(segment_prefix(self.scratch, self.start.part))
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        if status == WRONG:
            raise ConfigError(said.strip().splitlines()[-1])
        if status != 0:
            tell(self._ended(status, said, is_late=is_late))

    async def _start(self, errors: IO[bytes]) -> Process:
        command = [
            sys.executable,
            "-m",
            "midflight.run.device_check.child",
            self.device,
            str(self.scratch),
            str(self.seconds),
            str(self.start.room),
            self.start.part,
        ]
        environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return await asyncio.create_subprocess_exec(
            *guarded(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environ,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )

    def _ended(self, status: int, said: str, *, is_late: bool) -> DeviceTrial:
        lines = [line for line in said.splitlines() if line.strip()]
        if "Timeout (" in said:
            start = next(i for i, line in enumerate(lines) if "Timeout (" in line)
            shown = lines[start : start + LAST_LINES]
            how = f"did not end within {self.seconds:.0f} s"
        elif is_late:
            shown = lines[-LAST_LINES:]
            how = (
                f"did not end within {self.seconds:.0f} s, and was killed. It hangs, or this machine "
                "is busy: try again when nothing else runs here"
            )
        else:
            shown = [*lines[-1:], *lines[-LAST_LINES:-1]]  # the error before its traceback
            how = f"ended with status {status}"
        found = f"its process {how}: " + "\n".join(shown)
        remedy = "see the other parts: each was tried in a process of its own"
        return DeviceTrial(self.start.part, TrialOutcome.FAILED, found, remedy=remedy)


async def _read_all(process: Process, tell: Callable[[CheckedDevice | DeviceTrial], None]) -> None:
    """Waits for the end of the process."""
    assert process.stdout is not None
    async for line in process.stdout:
        with suppress(msgspec.DecodeError):  # the end of a line that was cut off
            tell(_decoded(line))
    await process.wait()


def remove_shared(prefix: str) -> None:
    """Removes files and folders of shared memory in whose names the prefix is. A part that was
    killed leaves them.
    """
    for place in shared_places():
        for path in place.glob(f"*{prefix}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


_decoded = msgspec.json.Decoder(CheckedDevice | DeviceTrial).decode
