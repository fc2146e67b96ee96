"""Several rollout processes as the trainer sees them: one, whose parts agree."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from tests.run.test_steps import batch

from midflight.run.api.service import WentOn
from midflight.run.trainer.shards import ShardedRollouts
from midflight.types import PackedBatch, Version
from midflight.types.facts import Stepped


@dataclass(eq=False)
class OneShard:
    """It would go on under `version`."""

    version: Version
    over: bool = True
    said: list[object] = field(default_factory=list[object])

    async def take(self, train_version: Version) -> PackedBatch:
        return batch(10 * self.version, train_version)

    async def done(self, step: Stepped) -> None:
        self.said.append((step.lease, step.num_tokens))

    async def restart(self, checkpoint: Version, *, least: Version = 0) -> WentOn:
        self.version = max(least, self.version)
        return WentOn(self.version, self.over)


@pytest.mark.parametrize(("versions", "together"), [((3, 3), 3), ((3, 6), 7), ((6, 3), 7)])
def test_all_go_on_from_a_checkpoint_under_one_number_that_none_has_leased_for(versions: tuple[int, int], together: int) -> None:
    shards = [OneShard(version) for version in versions]
    said = asyncio.run(ShardedRollouts(shards).restart(3))  # type: ignore[arg-type]
    assert said == WentOn(together, True) and {shard.version for shard in shards} == {together}
    shards[1].over = False
    assert not asyncio.run(ShardedRollouts(shards).restart(3)).over  # type: ignore[arg-type]


@pytest.mark.parametrize("skipped", [False, True])
def test_each_hears_of_its_own_lease_and_its_own_tokens(skipped: bool) -> None:
    async def main() -> None:
        sharded = ShardedRollouts(shards)  # type: ignore[arg-type]
        whole = await sharded.take(4)
        assert (whole.lease, whole.loss_mask.sum()) == (4, 4)
        await sharded.done(Stepped(whole.lease, 5, 0.0, 1.0, 0 if skipped else 4, {}, skipped))

    shards = [OneShard(1), OneShard(2)]
    asyncio.run(main())
    assert [shard.said for shard in shards] == [[(10, 0 if skipped else 2)], [(20, 0 if skipped else 2)]]
