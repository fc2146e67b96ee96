"""A trainer that goes back to a checkpoint, or skips a step, while gateway and engines stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.errors import UnknownLease
from midflight.run.rollout.system import RolloutSystem
from midflight.testing.ring import SimulatedReport, SimulatedTrainer
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.database import State
from midflight.types import Batch, GroupKey, PackedBatch, Reason, Version, WeightManifest
from midflight.types.facts import GroupClosed, GroupFinished, Stepped

from .site import Agents, Site, config, fast_engines
from .test_recovery import Place, states


class Foreign:
    """A trainer in a few lines, with a checkpoint whenever it is told."""

    def __init__(self, site: Site, system: RolloutSystem) -> None:
        self._site, self._system = site, system
        self.version: Version = 0
        self.learnt: list[GroupKey] = []
        self._saved: list[GroupKey] = []

    async def take(self, version: Version) -> Batch:
        """Of the newest batch taken; a lease goes with it."""
        packed = await self._system.take(version)
        return next(batch for batch in self._site.taken if batch.lease == packed.lease)

    async def step(self, batch: Batch, *, skipped: bool = False) -> None:
        self.version = batch.train_version + 1
        await self._system.done(Stepped(batch.lease, self.version, started=0.0, ended=0.1, num_tokens=0, metrics={}, skipped=skipped))
        self.learnt += () if skipped else (group.key for group in batch.groups)
        await self.publish()

    async def publish(self) -> None:
        await self._system.publish(WeightManifest(self.version, f"weights-{self.version}", "file", "nowhere", ()))

    async def save(self) -> None:
        await self._system.checkpointed(self.version)
        self._saved = list(self.learnt)

    async def go_back(self, checkpoint: Version) -> None:
        self.version = await self._system.restart(checkpoint)
        self.learnt = list(self._saved)
        await self.publish()


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_i8_a_trainer_that_goes_back_trains_no_prompt_twice_and_loses_none(tmp_path: Path, staleness: int) -> None:
    async def main() -> None:
        site = Site(
            config(staleness=staleness), tmp_path, engines=fast_engines(2, by_version=True), agents=Agents(0), num_tasks=12, sdk=False
        )
        async with site.opened() as ring:
            foreign, again, kept = Foreign(site, ring.system), set[Place](), set[GroupKey]()

            async def train() -> None:
                for version in range(3):
                    await foreign.step(await foreign.take(version))
                    if version == 0:
                        await foreign.save()
                ahead = await foreign.take(3) if staleness else None
                lost = foreign.learnt[2:]
                kept.update(finished.group.key for finished in site.seen.of(GroupFinished))
                await foreign.go_back(1)
                assert foreign.version == (5 if staleness else 4), "its number is above all that were handed out"
                assert ring.serving.fleet.served_version() == foreign.version
                assert ring.system.books.trained == 2
                if ahead is not None:
                    with pytest.raises(UnknownLease):
                        await foreign.step(ahead)
                    foreign.version = 5
                for _ in range(5):
                    await foreign.step(await foreign.take(foreign.version))
                places = [(key.epoch, key.index) for key in foreign.learnt]
                assert len(set(places)) == len(places) == ring.system.books.trained == 12, "trained twice"
                again.update((key.epoch, key.index) for key in lost)

            await ring.serve(train())
        for batch in site.taken:
            assert all(group.oldest_version >= batch.train_version - staleness for group in batch.groups), "I2"
        assert set(ring.system.books.dropped) <= {Reason.REQUEUED}, "of groups that ran"
        assert not kept & {closed.key for closed in site.seen.of(GroupClosed)}, "what had finished was promised kept"
        site.check_fates()
        found = states(tmp_path)
        assert again and all(found[place][-1][0] is not State.DROPPED for place in again), "a prompt lost"

    run_virtual(main, seed=0, max_seconds=3600)


def test_a_batch_that_was_given_back_comes_again(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(config(), tmp_path, sdk=False)
        async with site.opened() as ring:
            foreign = Foreign(site, ring.system)

            async def train() -> None:
                first = await foreign.take(0)
                await ring.system.take_back(first.lease)
                again = await foreign.take(0)
                assert again.lease != first.lease and [g.key for g in again.groups] == [g.key for g in first.groups]

            await ring.serve(train())

    run_virtual(main, seed=0, max_seconds=3600)


def test_i3_a_step_that_the_trainer_skipped_books_its_tokens_as_dropped(tmp_path: Path) -> None:
    class Skipping(SimulatedTrainer):
        def step(self, batch: PackedBatch) -> SimulatedReport:
            super().step(batch)
            return SimulatedReport(skipped="not_finite" if batch.train_version == 1 else None)

    async def main() -> Site:
        site = Site(config(steps=3), tmp_path, sdk=False)
        site.trainer = Skipping()
        await site.run()
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    skipped = int(site.trainer.batches[1].loss_mask.sum())
    assert skipped and site.books.tokens.dropped[Reason.SKIPPED] == skipped
    assert (site.books.trained, site.books.dropped) == (4, {Reason.SKIPPED: 2})
    assert [step.num_tokens > 0 for step in site.seen.of(Stepped)] == [True, False, True]
    site.check_fates()
