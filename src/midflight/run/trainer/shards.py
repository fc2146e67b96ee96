"""Several rollout processes as the trainer sees them: one. Each gives an equal part of every batch;
the first hands versions over for all.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import msgspec

from midflight.run.api.service import CopyAnswer, DeviceOwner, RolloutService, WentOn
from midflight.trajectories.packing import merged
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.facts import Stepped

T = TypeVar("T")


class Shard(RolloutService, Protocol):
    """One of the rollout processes."""

    async def __aenter__(self) -> object: ...
    async def __aexit__(self, *exc: object) -> None: ...
    async def restart(self, checkpoint: Version, *, least: Version = 0) -> WentOn: ...
    async def copy_store(self, version: Version) -> CopyAnswer: ...


@dataclass(frozen=True, slots=True)
class LeasePart:
    """The part of a batch that one shard gave."""

    lease: int
    num_tokens: int


class ShardedRollouts:
    """Implements `RolloutService`. A step has a part of every shard, so that the batch of a version
    is leased when the last shard has given its part.

    I2: a step at v takes B/R groups of each of R shards. Each shard holds the bound for itself
    (`buffer.staleness`), so no token of the batch is too old. The step waits for the slowest shard,
    as it would wait for the same stragglers in a single process.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._parts: dict[int, list[LeasePart]] = {}
        """The parts of each lease; a lease's number is its version."""
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for shard in self._shards:
            await self._open.enter_async_context(shard)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()

    async def take(self, train_version: Version) -> PackedBatch:
        """Waits for the parts of all shards; asked again, each gives the same."""
        batches = await self._all(lambda shard: shard.take(train_version))
        self._parts[train_version] = [
            LeasePart(batch.lease, int(batch.loss_mask.sum())) for batch in batches
        ]
        return await asyncio.to_thread(merged, train_version, batches)

    async def done(self, step: Stepped) -> None:
        """Reports to each shard the step with its own part."""
        parts = dict(zip(self._shards, self._parts[step.lease], strict=True))

        def own(part: LeasePart) -> Stepped:
            num_tokens = 0 if step.skipped else part.num_tokens
            return msgspec.structs.replace(step, lease=part.lease, num_tokens=num_tokens)

        await self._all(lambda shard: shard.done(own(parts[shard])))
        del self._parts[step.lease]

    async def publish(self, manifest: WeightManifest) -> None:
        await self._shards[0].publish(manifest)

    async def turn(self, of: DeviceOwner) -> None:
        """The first hands versions over, and alone knows when engines sleep."""
        await self._shards[0].turn(of)

    async def checkpointed(self, version: Version) -> None:
        await self._all(lambda shard: shard.checkpointed(version))

    async def copy_store(self, version: Version) -> CopyAnswer:
        """Copies all stores, or says why one was not copied."""
        answers = await self._all(lambda shard: shard.copy_store(version))
        return next((answer for answer in answers if answer.error), CopyAnswer())

    async def finish(self, version: Version) -> None:
        await self._all(lambda shard: shard.finish(version))

    async def restart(self, checkpoint: Version) -> WentOn:
        """Restarts all shards under one number. If one shard has leased further than others, the
        number is above the version of that lease.
        """
        self._parts.clear()
        said = await self._all(lambda shard: shard.restart(checkpoint))
        if len({one.version for one in said}) > 1:
            least = max(one.version for one in said) + 1
            said = await self._all(lambda shard: shard.restart(checkpoint, least=least))
        return WentOn(max(one.version for one in said), all(one.over for one in said))

    async def _all(self, ask: Callable[[Shard], Awaitable[T]]) -> list[T]:
        """Waits for the answers of all; the failure of one cancels the others."""

        async def answer(shard: Shard) -> T:
            return await ask(shard)

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(answer(shard)) for shard in self._shards]
        return [task.result() for task in asked]
