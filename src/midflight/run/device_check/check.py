"""The check of a device: a process for each part, and one report. It needs no torch.

| wait | waits for | ended by |
|---|---|---|
| `_tried` | the lines of a part's process, then its end | the process; its seconds, after which it ends itself; `GRACE_SECONDS` more, after which it is killed |
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event, Timer
from typing import IO

import msgspec

from midflight.errors import ConfigError
from midflight.run.device_check.report import (
    CheckedDevice,
    DeviceReport,
    DeviceTrial,
    Part,
    TrialOutcome,
)
from midflight.run.device_check.table import BUDGET_SECONDS, LEAST_SECONDS, PARTS, SERVERS
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.orphan_guard import guarded

GRACE_SECONDS = 10.0
"""The time that a process has beyond its own, to import torch and to write its stacks."""
LAST_LINES = 6
"""Lines of a process's errors that a report shows."""
WRONG = 2


def check_device(device: str, *, say: Callable[[str], None] = lambda _: None) -> DeviceReport:
    """Tries every part on a device, one after the other. Those that are no servers have
    `BUDGET_SECONDS` together. `say` gets each trial in a line as it ends. Raises `ConfigError` if
    there is no such device.
    """
    began = time.monotonic()
    parts: list[Part] = []
    about = CheckedDevice("unknown", {})
    with tempfile.TemporaryDirectory(prefix="midflight-doctor-") as scratch:
        for name, most in PARTS.items():
            say(f"{name}")
            left = BUDGET_SECONDS - (time.monotonic() - began)
            if name in SERVERS:
                left = most
            elif left < LEAST_SECONDS:
                parts.append(Part(name, (_too_late(name),)))
                continue
            started = time.monotonic()
            process = _PartProcess(device, Path(scratch), seconds=min(most, left), part=name)
            trials: list[DeviceTrial] = []
            for found in process.run():
                if isinstance(found, CheckedDevice):
                    about = found
                else:
                    trials.append(found)
                    say(f"  {found.outcome.value}: {found.what}: {found.line}")
            parts.append(Part(name, tuple(trials), time.monotonic() - started))
    return DeviceReport(
        device=device,
        title=about.title,
        date=datetime.now().astimezone().isoformat(timespec="minutes"),
        versions=about.versions,
        seconds=time.monotonic() - began,
        parts=tuple(parts),
    )


def _end_late(process: subprocess.Popen[bytes], late: Event) -> None:
    late.set()
    process.kill()


def _too_late(name: str) -> DeviceTrial:
    why = f"the {BUDGET_SECONDS / 60:.0f} minutes of a check were over"
    return DeviceTrial(name, TrialOutcome.NOT_TRIED, why)


@dataclass(frozen=True, slots=True)
class _PartProcess:
    """The process of one part."""

    device: str
    scratch: Path
    seconds: float
    part: str

    def run(self) -> Iterator[CheckedDevice | DeviceTrial]:
        """Yields what it says. An end that is none of its own is one more trial, which failed.
        Raises `ConfigError` if there is no such device.
        """
        with tempfile.TemporaryFile() as errors:
            process = self._start(errors)
            late = Event()
            killing = Timer(self.seconds + GRACE_SECONDS, partial(_end_late, process, late))
            killing.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    with suppress(msgspec.DecodeError):  # the end of a line that was cut off
                        yield _read(line)
                status = process.wait()
            finally:
                killing.cancel()
                process.kill()
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        if status == WRONG:
            raise ConfigError(said.strip().splitlines()[-1])
        if status != 0:
            yield self._ended(status, said, late=late.is_set())

    def _start(self, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "midflight.run.device_check.child",
            self.device,
            str(self.scratch),
            str(self.seconds),
            self.part,
        ]
        environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            start_new_session=True,
        )

    def _ended(self, status: int, said: str, *, late: bool) -> DeviceTrial:
        lines = [line for line in said.splitlines() if line.strip()]
        if "Timeout (" in said:
            start = next(i for i, line in enumerate(lines) if "Timeout (" in line)
            shown = lines[start : start + LAST_LINES]
            how = f"did not end within {self.seconds:.0f} s"
        elif late:
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
        return DeviceTrial(self.part, TrialOutcome.FAILED, found, remedy=remedy)


_read = msgspec.json.Decoder(CheckedDevice | DeviceTrial).decode
