"""What the trainer asks of the rollout side, in one process or over HTTP: draw a batch, report a step, hand over weights."""

from __future__ import annotations

from typing import Protocol

import msgspec

from midflight.types import PackedBatch, Version, WeightManifest

PREFIX = "/midflight/v1"
"""Of the routes by which a trainer, a harness or a worker asks."""


class StepDone(msgspec.Struct, frozen=True):
    """A step that ended. `version` is the one it made; times are CLOCK_MONOTONIC seconds."""

    lease: int
    version: Version
    started: float
    ended: float
    num_tokens: int
    metrics: dict[str, float]


class RolloutService(Protocol):
    async def take(self, train_version: Version) -> PackedBatch:
        """Leases the batch to train at this version; waits until there is one. Asking again gives the same batch."""
        ...

    async def done(self, report: StepDone) -> None:
        """The step is over: its groups are trained, final with the checkpoint that contains them."""
        ...

    async def publish(self, manifest: WeightManifest) -> None:
        """Brings a version to the engines; returns when each serves it, is in quarantine, or is reserved for an evaluation."""
        ...

    async def checkpointed(self, version: Version) -> None:
        """A checkpoint of this version is on disk: what was trained up to it is final (I8)."""
        ...

    async def finish(self, version: Version) -> None:
        """No more steps: stops the rollouts and evaluates the last version; returns when that is done."""
        ...


class TakesWithin(RolloutService, Protocol):
    """A service whose batches are also asked for by requests that may not wait for ever."""

    async def take_within(self, train_version: Version, *, seconds: float) -> PackedBatch | None:
        """As `take`, but None when there is no batch yet after `seconds`; 0 looks once."""
        ...
