"""What both sides of `training.py` import: time and memory of processes, and the rewards of its
races.

It runs in both environments, so it needs neither Midflight nor trl; nor torch, see `apart`.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from midflight.types import Task

MIB = 1024
"""In the kernel's unit."""


def reset_peak() -> None:
    """From now on `peak_mib` tells the peak since now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib(pid: int | str = "self") -> float:
    """Resident memory of a process at its highest. Not `getrusage`, whose figure counts what the
    parent had when it started it.
    """
    return _status("VmHWM", pid)


def held_mib(pid: int | str = "self") -> float:
    """The same without what others hold as well: of a page that n processes map, an nth, as they
    map it now.
    """
    return (
        peak_mib(pid)
        - _read("Rss:", f"/proc/{pid}/smaps_rollup")
        + _read("Pss:", f"/proc/{pid}/smaps_rollup")
    )


def resident_mib() -> float:
    return _status("VmRSS", "self")


def _status(key: str, pid: int | str) -> float:
    return _read(key, f"/proc/{pid}/status")


def _read(key: str, file: str) -> float:
    lines = Path(file).read_text().splitlines()
    return next((int(line.split()[1]) / MIB for line in lines if line.startswith(key)), 0.0)


def apart(function: Callable[..., object], *given: object) -> None:
    """Calls it in a process of its own, so that this one never holds torch: its pages would count
    as shared with the processes that it measures.
    """
    process = multiprocessing.get_context("spawn").Process(target=function, args=given)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


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


# --- Rewards --------------------------------------------------------------------------------------


def exact(reply: str, expected: str) -> float:
    return float(reply.strip() == expected.strip())


def share_of_e(reply: str, expected: str) -> float:
    """Share of the letter E in the reply; what it has less than `expected` counts as other
    letters.
    """
    return reply.count("E") / max(len(reply), len(expected))


REWARDS: Mapping[str, Callable[[str, str], float]] = {
    "short": exact,
    "larger": exact,
    "vocabulary": exact,
    "long": share_of_e,
}
"""By race."""


async def write_e(task: Task, client: AsyncOpenAI) -> float:
    """One question, one reply, scored by `share_of_e`."""
    question = str(task.data["question"])
    expected = str(task.data["answer"])
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}]
    )
    return share_of_e(completion.choices[0].message.content or "", expected)
