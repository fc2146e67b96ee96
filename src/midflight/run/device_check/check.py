"""The check of a device: a process for each part, and one report. It needs no torch.

The first part runs alone and says how much memory the device has. Then parts run side by side, in
lanes. Those that measure speeds come last, one after the other: beside others their figures would
be wrong.

| wait | waits for | ended by |
|---|---|---|
| `_DeviceCheck._in_lanes` | the end of a part, which frees its lane and its memory | each part's own seconds |
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from asyncio import Task
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from midflight.errors import ConfigError, first_error
from midflight.run.device_check.interpreters import why_absent
from midflight.run.device_check.lanes import Lanes, PartStart, in_order, num_lanes
from midflight.run.device_check.part_process import PartProcess, remove_shared
from midflight.run.device_check.report import (
    CheckedDevice,
    DeviceReport,
    DeviceTrial,
    Part,
    TrialOutcome,
)
from midflight.run.device_check.table import FIRST, PARTS


def check_device(device: str, *, say: Callable[[str], None] = lambda _: None) -> DeviceReport:
    """Tries every part on a device. `say` gets each trial in a line as it ends. Raises `ConfigError`
    if there is no such device.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="midflight-doctor-") as scratch:
        check = _DeviceCheck(device, Path(scratch), say)
        try:
            asyncio.run(check.run())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            remove_shared(Path(scratch).name)  # what a process made after its part was killed
    about = check.about or CheckedDevice("unknown", {})
    return DeviceReport(
        device=device,
        title=about.title,
        date=datetime.now().astimezone().isoformat(timespec="minutes"),
        versions=about.versions,
        seconds=time.monotonic() - began,
        parts=tuple(check.parts[name] for name in PARTS),
    )


class _DeviceCheck:
    """The parts that have ended, and what the device has said of itself."""

    def __init__(self, device: str, scratch: Path, say: Callable[[str], None]) -> None:
        self.parts: dict[str, Part] = {}
        self.about: CheckedDevice | None = None
        self._device = device
        self._scratch = scratch
        self._say = say

    async def run(self) -> None:
        """Waits until all parts have ended."""
        await self._in_lanes([name for name in PARTS if name == FIRST], number=1)
        beside = [name for name in in_order(PARTS) if self._is_tried(name)]
        await self._in_lanes(beside, number=num_lanes())
        alone = [name for name, plan in PARTS.items() if plan.is_alone and name != FIRST]
        await self._in_lanes([name for name in alone if self._is_tried(name)], number=1)

    def _is_tried(self, name: str) -> bool:
        """False for a part of a server that is not here, which is noted with the reason."""
        kind = PARTS[name].server
        why = why_absent(kind) if kind else ""
        if why:
            self.parts[name] = Part(name, (DeviceTrial(name, TrialOutcome.NOT_TRIED, why),))
        return not why

    async def _in_lanes(self, names: Sequence[str], *, number: int) -> None:
        """Waits for these parts, of which `number` at most run side by side."""
        memory = self.about.memory if self.about else 0
        lanes = Lanes(names, PARTS, number=number, memory=memory)
        running: dict[Task[None], PartStart] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                while (start := lanes.next()) is not None:
                    running[tasks.create_task(self._try(start))] = start
                if not running:
                    return
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    lanes.end(running.pop(task))

    async def _try(self, start: PartStart) -> None:
        """Waits for one part."""
        began = time.monotonic()
        plan = PARTS[start.part]
        at = f"alone: {start.part}" if plan.is_alone else f"lane {start.lane}: {start.part}"
        trials: list[DeviceTrial] = []

        def told(found: CheckedDevice | DeviceTrial) -> None:
            if isinstance(found, CheckedDevice):
                self.about = self.about or found
                return
            trials.append(found)
            self._say(f"{at}: {found.outcome.value}: {found.what}: {found.line}")

        self._say(f"{at}: begins")
        process = PartProcess(self._device, self._scratch, start, plan.seconds)
        try:
            await process.run(told)
        except ConfigError as error:
            if self.about is None:
                raise
            told(DeviceTrial(start.part, TrialOutcome.FAILED, f"the device is gone: {error}"))
        seconds = time.monotonic() - began
        self._say(f"{at}: ended after {seconds:.0f} s")
        self.parts[start.part] = Part(start.part, tuple(trials), seconds)
