"""A trainer without weights: it takes its time, numbers versions, and publishes manifests that only a scripted engine can fetch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from midflight.run.api.service import RolloutService
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.facts import Stepped


@dataclass(frozen=True, slots=True)
class SimulatedReport:
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped: str | None = None


class SimulatedTrainer:
    """Implements `run.training`'s `Steps` and `Outbox`. `on_step` sees each batch before its step is made; what it raises, the step raises."""

    def __init__(self, *, version: Version = 0, on_step: Callable[[PackedBatch], None] | None = None) -> None:
        self.version = self._first = version
        self.num_steps = 0
        self.batches: list[PackedBatch] = []
        self.released: list[Version] = []
        self._on_step = on_step

    def step(self, batch: PackedBatch) -> SimulatedReport:
        assert batch.train_version == self.version, f"a batch for version {batch.train_version} at {self.version}"
        if self._on_step is not None:
            self._on_step(batch)
        self.batches.append(batch)
        self.version += 1
        self.num_steps += 1
        return SimulatedReport()

    def publish(self, version: Version) -> WeightManifest:
        """The first version is what scripted engines start with."""
        fingerprint = "initial" if version == self._first else f"weights-{version}"
        return WeightManifest(version, fingerprint, "file", "nowhere", ())

    def release(self, version: Version) -> None:
        self.released.append(version)


class SlowSteps:
    """Stands between trainer and rollout side, and makes steps take time on the loop's clock, the virtual one too.

    `to_thread` runs inline under virtual time, so a step's time passes here, between the batch and the report of its step.
    """

    def __init__(self, service: RolloutService, *, seconds: Callable[[], float]) -> None:
        self._service, self._seconds = service, seconds

    async def take(self, train_version: Version) -> PackedBatch:
        return await self._service.take(train_version)

    async def done(self, step: Stepped) -> None:
        """Waits for the step's duration, then for the service."""
        await asyncio.sleep(self._seconds())
        await self._service.done(step)

    async def publish(self, manifest: WeightManifest) -> None:
        await self._service.publish(manifest)

    async def checkpointed(self, version: Version) -> None:
        await self._service.checkpointed(version)

    async def finish(self, version: Version) -> None:
        await self._service.finish(version)
