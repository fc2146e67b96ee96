"""Time and memory of processes. Imports nothing of either side: it runs in both environments."""

from __future__ import annotations

import json
import time
from pathlib import Path

MIB = 1024
"""In the kernel's unit."""


def reset_peak() -> None:
    """From now on `peak_mib` tells the peak since now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib(pid: int | str = "self") -> float:
    """Resident memory of a process at its highest. Not `getrusage`, whose figure counts what the parent had when it started it."""
    return _status("VmHWM", pid)


def resident_mib() -> float:
    return _status("VmRSS", "self")


def _status(key: str, pid: int | str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / MIB for line in lines if line.startswith(key)), 0.0)


class Meter:
    """Wall and CPU seconds of steps. `leave_out` takes something off the step that is under way."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._start = (0.0, 0.0)

    def begin(self) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def end(self) -> None:
        self.wall.append(time.perf_counter() - self._start[0])
        self.cpu.append(time.process_time() - self._start[1])

    def leave_out(self, *, wall: float, cpu: float) -> None:
        self._start = (self._start[0] + wall, self._start[1] + cpu)

    def write(self, path: Path, **more: object) -> None:
        path.write_text(json.dumps({"wall": self.wall, "cpu": self.cpu, **more}))
