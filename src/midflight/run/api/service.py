"""The trainer's interface to the rollout side: the trainer draws a batch, reports a step and hands
over weights.
"""

from enum import StrEnum
from typing import Protocol

import msgspec

from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.facts import Stepped

PREFIX = "/midflight/v1"
"""The beginning of the paths of the routes that a trainer, a harness or a worker calls."""
LIFE = "x-midflight-life"
"""A header with the number of the trainer of the run that sends the request, counted from 0. A
trainer that was given up may not be dead but cut off: its requests are refused.
"""


class DeviceOwner(StrEnum):
    """Whose turn it is on devices that engines and trainer share in turns."""

    TRAINER = "trainer"
    ENGINES = "engines"


class RolloutService(Protocol):
    async def take(self, train_version: Version) -> PackedBatch:
        """Leases the batch to train at this version; waits until there is one. Asking again gives
        the same batch.
        """
        ...

    async def done(self, step: Stepped) -> None:
        """The step is over. Its groups are trained, and final with the checkpoint that contains
        them; or they are dropped, if it was skipped.
        """
        ...

    async def publish(self, manifest: WeightManifest) -> None:
        """Brings a version to the engines; returns when each serves it, is in quarantine, or is
        reserved for an evaluation.
        """
        ...

    async def turn(self, of: DeviceOwner) -> None:
        """For a run with `engine.share = "time"`. The trainer asks for its turn, and gets it when
        all engines sleep; or the engines' turn has come, and this returns when they are awake, as
        `publish` does too.
        """
        ...

    async def checkpointed(self, version: Version) -> None:
        """Reports that a checkpoint of this version is on disk. All training up to it is then final
        (I8).
        """
        ...

    async def finish(self, version: Version) -> None:
        """There are no more steps. Groups of batches that were drawn and not trained wait again.
        Stops the rollouts and evaluates the last version; returns when that is done.
        """
        ...


class CopyAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `store`. If there is no copy, `error` holds the reason."""

    error: str = ""


class TrainerService(RolloutService, Protocol):
    """The interface for a foreign trainer. It may limit its wait for a batch, and it may go back to
    a checkpoint while the gateway and the engines stay.
    """

    async def take_within(self, train_version: Version, *, seconds: float) -> PackedBatch | None:
        """Does what `take` does, but returns None if there is no batch after `seconds`. With 0 it
        looks once.
        """
        ...

    async def take_back(self, lease: int) -> None:
        """Reports that the step of a lease will not be made: its groups wait again. Raises
        `UnknownLease` if it is not open.
        """
        ...

    async def restart(self, checkpoint: Version, *, least: Version = 0) -> Version:
        """Reports that the trainer goes on from its checkpoint: groups of later steps wait again,
        exactly once (I8).

        Returns the number under which the checkpoint's weights go on: its own, or one that no other
        weights have had, and `least` at least. Raises `OutOfTurn` if the last step was made and
        this is not its checkpoint.
        """
        ...

    async def copy_store(self, version: Version) -> CopyAnswer:
        """Copies the store into the run's folder, for the checkpoint of this version. Returns when
        the copy is on disk, or could not be made.
        """
        ...

    @property
    def over(self) -> bool:
        """True if a trainer has said `finish`: no more batches come."""
        ...


class WentOn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `restart`: the number under which the checkpoint's weights go on, and whether
    the last step was made before.
    """

    version: Version
    over: bool = False
