"""The trainer's loop and its checkpoints."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from midflight.run.trainer.training import TrainingLoop
from midflight.testing.ring import SimulatedTrainer
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.facts import Stepped


class Said:
    """A rollout side with a batch for every step. Keeps what it was told, in order."""

    def __init__(self, rewards: Callable[[Version], list[float]] = lambda _: [0.0]) -> None:
        self.facts: list[tuple[str, Version]] = []
        self._rewards = rewards

    async def take(self, train_version: Version) -> PackedBatch:
        rewards = np.array(self._rewards(train_version))
        made = SimpleNamespace(lease=train_version, train_version=train_version, rewards=rewards, loss_mask=np.ones(1))
        return cast(PackedBatch, made)

    async def done(self, report: Stepped) -> None:
        self.facts.append(("done", report.version))

    async def publish(self, manifest: WeightManifest) -> None:
        self.facts.append(("served", manifest.version))

    async def checkpointed(self, version: Version) -> None:
        self.facts.append(("checkpointed", version))

    async def finish(self, version: Version) -> None:
        self.facts.append(("finish", version))


class Disk:
    """Where copies are written. A write ends when the trainer has made so many steps more; copies in memory are counted."""

    def __init__(self, *, steps_per_write: int, fails: bool = False) -> None:
        self.trainer = SimulatedTrainer(on_step=self._step)
        self.num_copies = self.max_copies = 0
        self.written: list[Version] = []
        self._steps_per_write, self._fails = steps_per_write, fails
        self._stepped = threading.Condition()

    def _step(self, batch: PackedBatch) -> None:
        with self._stepped:
            self._stepped.notify_all()

    def stage(self) -> Callable[[], None]:
        version = self.trainer.version
        self.num_copies += 1
        self.max_copies = max(self.max_copies, self.num_copies)

        def write() -> None:
            if self._fails:
                raise OSError("no space left")
            with self._stepped:
                assert self._stepped.wait_for(lambda: self.trainer.num_steps >= min(version + self._steps_per_write, 6), timeout=5), "held"
            self.written.append(version)
            self.num_copies -= 1

        return write


def run(disk: Disk, *, every: int) -> list[tuple[str, Version]]:
    said = Said()
    loop = TrainingLoop(disk.trainer, disk.trainer, said, steps=6, prefetch=True, stage=disk.stage, save_every=every)
    asyncio.run(loop.run())
    return said.facts


def test_steps_go_on_while_a_checkpoint_is_written_and_i8_it_is_told_after_its_step_and_its_write() -> None:
    disk = Disk(steps_per_write=1)
    facts = run(disk, every=2)
    assert disk.written == [2, 4, 6]
    for version in disk.written:
        assert facts.index(("done", version)) < facts.index(("checkpointed", version)) < facts.index(("finish", 6))


def test_a_checkpoint_waits_for_the_write_before_so_that_memory_holds_one_copy() -> None:
    disk = Disk(steps_per_write=0)
    facts = run(disk, every=1)
    assert disk.written == [1, 2, 3, 4, 5, 6]
    assert disk.max_copies == 1
    assert [version for fact, version in facts if fact == "checkpointed"] == disk.written


def test_the_last_version_is_saved_once_whatever_the_interval() -> None:
    assert run(Disk(steps_per_write=0), every=0)[-2:] == [("checkpointed", 6), ("finish", 6)]


def test_every_few_versions_one_is_published_and_the_last_and_i8_each_step_is_told_in_order_before_its_checkpoint() -> None:
    disk, said = Disk(steps_per_write=0), Said()
    loop = TrainingLoop(disk.trainer, disk.trainer, said, steps=6, prefetch=True, stage=disk.stage, save_every=2, publish_every=4)
    asyncio.run(loop.run())
    assert [version for fact, version in said.facts if fact == "served"] == [0, 4, 6]
    assert [version for fact, version in said.facts if fact == "done"] == [1, 2, 3, 4, 5, 6]
    assert disk.trainer.passed_over == [1, 2, 3, 5] and disk.trainer.released == [0, 4]
    for version in disk.written:
        assert said.facts.index(("done", version)) < said.facts.index(("checkpointed", version))


def test_a_checkpoint_that_cannot_be_written_ends_the_run() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(Disk(steps_per_write=0, fails=True), every=2)
    assert caught.group_contains(OSError, match="no space left")


def steps_until(reward: float, rewards: Callable[[Version], list[float]]) -> int:
    trainer, said = SimulatedTrainer(), Said(rewards)
    loop = TrainingLoop(trainer, trainer, said, steps=60, prefetch=True, stage=lambda: lambda: None, save_every=0, stop_at_reward=reward)
    asyncio.run(loop.run())
    return trainer.num_steps


def test_a_run_ends_when_the_mean_reward_of_twenty_steps_is_reached() -> None:
    assert steps_until(0.5, lambda version: [float(version >= 30)]) == 40
    assert steps_until(0.5, lambda _: [1.0, 0.0]) == 20, "no sooner, however good it is"
    assert steps_until(0.5, lambda _: [0.4]) == 60


def test_a_rollout_without_a_reward_does_not_keep_a_run_from_ending() -> None:
    assert steps_until(0.5, lambda version: [1.0, float("nan")] if version % 3 else [float("nan")]) == 30, "twenty of them had rewards"


class SlowAtFirst(Said):
    """Takes the first report only after some steps more."""

    async def done(self, report: Stepped) -> None:
        if report.version == 1:
            await asyncio.sleep(0.1)
        await super().done(report)


def test_steps_are_reported_in_their_order_also_where_one_report_takes_longer() -> None:
    trainer, said = SimulatedTrainer(), SlowAtFirst()
    loop = TrainingLoop(trainer, trainer, said, steps=6, prefetch=True, stage=lambda: lambda: None, save_every=0)
    asyncio.run(loop.run())
    assert [version for fact, version in said.facts if fact == "done"] == [1, 2, 3, 4, 5, 6]
