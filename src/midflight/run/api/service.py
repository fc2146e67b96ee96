"""What the trainer asks of the rollout side: draw a batch, report a step, hand over weights; and how it asks over HTTP."""

from __future__ import annotations

from typing import Protocol, Self

import msgspec

from midflight.run.parts import PartLost
from midflight.trajectories.packing import from_bytes
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.facts import Stepped
from midflight.wire.client import HttpClient

PREFIX = "/midflight/v1"
"""Of the routes by which a trainer, a harness or a worker asks."""


class RolloutService(Protocol):
    async def take(self, train_version: Version) -> PackedBatch:
        """Leases the batch to train at this version; waits until there is one. Asking again gives the same batch."""
        ...

    async def done(self, step: Stepped) -> None:
        """The step is over: its groups are trained, final with the checkpoint that contains them, or dropped if it was skipped."""
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


class TrainerService(RolloutService, Protocol):
    """What a foreign trainer may ask for too: it may not wait for ever, and it may go back while the gateway and the engines stay."""

    async def take_within(self, train_version: Version, *, seconds: float) -> PackedBatch | None:
        """As `take`, but None when there is no batch yet after `seconds`; 0 looks once."""
        ...

    async def take_back(self, lease: int) -> None:
        """The step of a lease will not be made: its groups wait again. `UnknownLease` if it is not open."""
        ...

    async def restart(self, checkpoint: Version) -> Version:
        """The trainer goes on from its checkpoint: groups of later steps wait again, exactly once (I8).

        Returns the number under which the checkpoint's weights go on: its own, or one that no other weights have had.
        """
        ...


class RolloutClient:
    """`RolloutService` of another process. When that is dead, each call is `PartLost` at once, never a wait."""

    def __init__(self, url: str, *, token: str) -> None:
        # A batch may take as long as its slowest rollout, so answers have no deadline; connecting has one.
        self._http = HttpClient(url, lost=_lost, token=token, connect_seconds=60)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.__aexit__(*exc)

    async def take(self, train_version: Version) -> PackedBatch:
        return from_bytes(await self._post("take", {"train_version": train_version}))

    async def done(self, step: Stepped) -> None:
        await self._post("done", step)

    async def publish(self, manifest: WeightManifest) -> None:
        await self._post("weights", manifest)

    async def checkpointed(self, version: Version) -> None:
        await self._post("checkpointed", {"version": version})

    async def finish(self, version: Version) -> None:
        await self._post("finish", {"version": version})

    async def _post(self, verb: str, body: object) -> bytes:
        answer = await self._http.call("POST", f"{PREFIX}/{verb}", msgspec.json.encode(body))
        if answer.status != 200:
            raise PartLost(f"the rollout process answered {verb} with {answer.status}: {answer.content[:500].decode(errors='replace')}")
        return answer.content


def _lost(what: str) -> PartLost:
    return PartLost(f"the rollout process {what}; its log says why it ended")
