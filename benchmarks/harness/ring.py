"""Whole runs in this process: the launcher's ring, watched while it trains."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from harness.processes import cpu_seconds, held_mib
from midflight.config.sections import Config
from midflight.observe.history import read_journal
from midflight.observe.lines import StepLine
from midflight.run.launcher.folder import prepare
from midflight.run.launcher.ring import Ring
from midflight.run.parts import Message, ModelReady, Progress, Purpose, Ready


@dataclass(frozen=True)
class Measured:
    """The steps of a run after its warm-up."""

    samples_per_second: float
    num_steps: int
    cpu: Mapping[str, float]
    """Seconds per step, by process."""
    waits: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds per step, by "who for whom"."""
    handover: tuple[float, float] = (0.0, 0.0)
    """Median seconds to stage, seen from the rollout process, and of the engine's pause."""

    def cpu_of(self, part: str) -> float:
        """Seconds per step of all processes whose names begin so."""
        return sum(seconds for name, seconds in self.cpu.items() if name.startswith(part))


class Watch:
    """Receives the messages of a ring, and reads then what each process has used so far."""

    ring: Ring

    def __init__(self, *, reads_memory: bool = False) -> None:
        """To read memory takes the processes some milliseconds each time."""
        self._reads_memory = reads_memory
        self.serving = 0.0
        """When the rollout process began to serve."""
        self.ended = 0.0
        """When the last message of the training came."""
        self.cpu_before = 0.0
        """CPU seconds of all processes when the rollout process began to serve."""
        self.peaks: dict[str, float] = {}
        """Megabytes, by process."""
        self._seconds: list[float] = []
        self._cpu: list[dict[str, float]] = []
        self._url: asyncio.Future[str] | None = None

    @property
    def url(self) -> asyncio.Future[str]:
        """The address of the rollout process, once there is one."""
        if self._url is None:
            self._url = asyncio.get_running_loop().create_future()
        return self._url

    @property
    def cpu_seconds(self) -> float:
        """Adds up all processes, from the moment the rollout process served to the last message."""
        newest: dict[str, float] = {}
        for reading in self._cpu:
            newest |= reading
        return sum(newest.values()) - newest.get("launcher", 0.0) - self.cpu_before

    def hear(self, message: Message) -> None:
        if isinstance(message, Ready) and message.url is not None and not self.url.done():
            self.url.set_result(message.url)
            self.cpu_before = sum(self._read().values())
            self.serving = time.monotonic()
        if isinstance(message, Progress):
            self._seconds.append(message.status.seconds)
            self._cpu.append({**self._read(), "launcher": time.process_time()})
        if isinstance(message, Progress | ModelReady):
            self.ended = time.monotonic()

    def _read(self) -> dict[str, float]:
        """CPU seconds of each child that lives. Its memory goes into the peaks, where wanted."""
        cpu: dict[str, float] = {}
        for child in self.ring.children.newest.values():
            if not child.running or child.pid is None:
                continue
            cpu[child.name] = cpu_seconds(child.pid)
            if self._reads_memory:
                with suppress(OSError):  # it has just ended
                    held = held_mib(child.pid)
                    self.peaks[child.name] = max(held, self.peaks.get(child.name, 0.0))
        return cpu

    def measured(self, config: Config, *, warmup: int) -> Measured:
        steps = read_journal(config.run.folder / "metrics.jsonl").steps
        first = steps[warmup - 1]
        last = steps[-1]
        counted = steps[warmup:]
        samples = len(counted) * config.rollout.groups_per_step * config.rollout.group_size
        cpu: dict[str, float] = {}
        for name in sorted({name for reading in self._cpu for name in reading}):
            cpu[name] = self._used(name, first.seconds, last.seconds) / len(counted)
        return Measured(
            samples_per_second=samples / (last.seconds - first.seconds),
            num_steps=len(counted),
            cpu=cpu,
            waits=_waits(counted),
            handover=(
                _median([step.stage_seconds for step in counted]),
                _median([step.pause_seconds for step in counted]),
            ),
        )

    def _used(self, name: str, start: float, stop: float) -> float:
        """CPU seconds of a process between two times of the run, by its readings; the last report
        comes when it has ended.
        """
        times: list[float] = []
        used: list[float] = []
        for seconds, cpu in zip(self._seconds, self._cpu, strict=True):
            if name in cpu:
                times.append(seconds)
                used.append(cpu[name])
        before, after = np.interp([start, stop], times, used)
        return float(after - before)


def _waits(steps: Sequence[StepLine]) -> dict[str, float]:
    """Seconds per step, by "who for whom"."""
    waits: dict[str, float] = {}
    for step in steps:
        for name, seconds in (step.waits or {}).items():
            waits[name] = waits.get(name, 0.0) + seconds / len(steps)
    return waits


def _median(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def new_folder(config: Config) -> None:
    """Makes the run's folder, in the place of an earlier one."""
    prepare(config.run.folder, config, resume=False)


def watched_ring(
    config: Config, watch: Watch, *, token: str, model: ModelReady | None = None
) -> Ring:
    """A ring whose messages go to `watch`. With `model` it needs no trainer to make one."""
    watch.ring = Ring(config, on_message=watch.hear, control_token=token, model=model)
    return watch.ring


def train_watched(config: Config, *, reads_memory: bool = False) -> Watch:
    """A whole training run, as `midflight train` makes it. Waits for its end."""
    new_folder(config)
    watch = Watch(reads_memory=reads_memory)
    made = watched_ring(config, watch, token=secrets.token_urlsafe())
    asyncio.run(made.run(Purpose.TRAIN))
    return watch


def ring(config: Config, *, warmup: int) -> Measured:
    """The steps of a whole training run after the first `warmup`."""
    return train_watched(config).measured(config, warmup=warmup)
