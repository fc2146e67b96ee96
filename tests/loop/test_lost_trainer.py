"""A trainer that is lost at any point of a step, while engines, gateway, agents and open requests stay: I1 to I6, I8, and the bound on age."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from midflight.config.sections import EngineSection, EvaluationSection
from midflight.run.rollout.system import RolloutSystem
from midflight.run.trainer.training import TrainingLoop
from midflight.testing.ring import SimulatedTrainer, SmallRing
from midflight.testing.virtual_time import run_virtual
from midflight.types import Batch, PackedBatch, Reason, Task, Version, WeightManifest
from midflight.types.facts import Admitted, Evaluated, GroupClosed, Stepped, VersionServed, WeightsCommitted, WentBack

from .site import Agents, Site, config, fast_engines

T = TypeVar("T")
NUM_STEPS, GROUPS = 6, 2
HELD_OUT = tuple(Task(f"h{i}", "numbers", {"question": f"held out {i}"}) for i in range(2))


class Killed(Exception):
    """The instant of death."""


class Wire:
    """Between a trainer and the rollout side, as HTTP is: what was asked goes on there though who asked has died; only `take` ends with it.

    `dies` says at which of its calls the trainer dies: before the other side has heard it, in the middle of it, or after its answer.
    """

    def __init__(self, system: RolloutSystem, requests: asyncio.TaskGroup, *, dies: tuple[str, int, str] | None) -> None:
        self._system, self._requests = system, requests
        self._dies, self._calls = dies, Counter[str]()

    async def take(self, train_version: Version) -> PackedBatch:
        return await self._asked("take", lambda: self._system.take(train_version))

    async def done(self, step: Stepped) -> None:
        await asyncio.sleep(0.4)  # of the step
        await self._asked("done", lambda: self._system.done(step))

    async def publish(self, manifest: WeightManifest) -> None:
        await self._asked("publish", lambda: self._system.publish(manifest))

    async def checkpointed(self, version: Version) -> None:
        await self._asked("checkpointed", lambda: self._system.checkpointed(version))

    async def finish(self, version: Version) -> None:
        await self._asked("finish", lambda: self._system.finish(version))

    async def _asked(self, verb: str, ask: Callable[[], Awaitable[T]]) -> T:
        self._calls[verb] += 1
        when = self._dies[2] if self._dies is not None and self._dies[:2] == (verb, self._calls[verb]) else None
        if when == "before":
            raise Killed
        if verb == "take":
            answer = await ask()
        else:
            answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            self._requests.create_task(self._answer(ask, answered))
            if when == "amid":
                await asyncio.sleep(0.01)
                raise Killed
            answer = await answered
        if when is not None:
            raise Killed
        return answer

    async def _answer(self, ask: Callable[[], Awaitable[T]], answered: asyncio.Future[T]) -> None:
        answer = await ask()
        if not answered.done():
            answered.set_result(answer)


class Lives:
    """Trainers, one after the other, over one rollout side that lives through all of them. Each saves every other step."""

    def __init__(self, folder: Path, *, staleness: int, evaluating: int = 0, seed: int = 0, lend: bool = False) -> None:
        made = config(staleness=staleness, every=2, steps=NUM_STEPS, groups=GROUPS)
        made = made.model_copy(update={"evaluation": EvaluationSection(eval_every=evaluating), "engine": EngineSection(lend=lend)})
        engines = fast_engines(2, by_version=True, stage_seconds=0.05)
        for number, engine in enumerate(engines):
            engine.name = f"engine{number}"
        self.site = Site(made, folder, engines=engines, agents=Agents(seed, longest=1.5), sdk=False)
        if evaluating:
            self.site.sources = [replace(source, heldout=HELD_OUT) for source in self.site.sources]
        self.staleness = staleness
        self.trainer = SimulatedTrainer(on_step=self._on_step)
        self.saved = (0, 0)
        """Version and steps of the newest checkpoint on disk."""
        self.learnt: list[Batch] = []
        """Of the steps that the weights have."""
        self._learnt_by_version: list[tuple[Version, Batch]] = []
        self.num_lost = 0

    def _on_step(self, batch: PackedBatch) -> None:
        taken = next(taken for taken in self.site.taken if taken.lease == batch.lease)
        oldest = [group.oldest_version for group in taken.groups]
        assert all(version is not None and version >= batch.train_version - self.staleness for version in oldest), "I2"
        self._learnt_by_version.append((batch.train_version + 1, taken))

    def _stage(self) -> Callable[[], None]:
        return partial(self._save, self.trainer.version, self.trainer.num_steps)

    def _save(self, version: Version, num_steps: int) -> None:
        self.saved = (version, num_steps)

    async def train(self, ring: SmallRing, *deaths: tuple[str, int, str] | float) -> None:
        """A trainer for each death, and one that comes to the last step."""
        async with asyncio.TaskGroup() as requests:
            for death in (*deaths, None):
                if await self._life(ring, requests, death):
                    return
                self.num_lost += 1
                await asyncio.sleep(0.3)
                version = await ring.system.restart(self.saved[0])
                self._learnt_by_version = [(made, batch) for made, batch in self._learnt_by_version if made <= self.saved[0]]
                self.trainer.version, self.trainer.num_steps = version, self.saved[1]
                await asyncio.sleep(0.3)  # it loads

    async def _life(self, ring: SmallRing, requests: asyncio.TaskGroup, death: tuple[str, int, str] | float | None) -> bool:
        """Whether it came to its end."""
        wire = Wire(ring.system, requests, dies=death if isinstance(death, tuple) else None)
        if ring.system.over:
            await wire.finish(self.trainer.version)
            return True
        loop = TrainingLoop(
            self.trainer, self.trainer, wire, steps=NUM_STEPS, prefetch=self.staleness > 0, stage=self._stage, save_every=2
        )  # fmt: skip
        came = False
        with suppress(TimeoutError):
            async with asyncio.timeout(death if isinstance(death, float) else None):
                try:
                    await loop.run()
                    came = True
                except* Killed:
                    pass
        return came

    def check(self) -> None:
        """I1 and I3 hold after every fact, in the books. Nothing is trained twice, nothing that had finished is lost, nobody was interrupted."""
        site, books = self.site, self.site.books
        places = [(group.key.epoch, group.key.index) for _, batch in self._learnt_by_version for group in batch.groups]
        assert len(places) == len(set(places)) == books.trained == NUM_STEPS * GROUPS, "trained once, in the weights that there are (I8)"
        assert site.failed_requests == [], "no request failed"
        starts = Counter(fact.key for fact in site.seen.of(Admitted))
        assert set(starts.values()) == {1}, "what ran when the trainer died went on running"
        assert {closed.reason for closed in site.seen.of(GroupClosed)} <= {Reason.REQUEUED}
        assert served(site) == sorted(served(site)), "versions never go backwards"
        for engine in site.engines:
            live = [fact.version for fact in site.seen.of(WeightsCommitted) if fact.engine == engine.name]
            assert live == sorted(live)
        site.check_fates()
        site.check_answers()


def served(site: Site) -> list[Version]:
    return [fact.version for fact in site.seen.of(VersionServed)]


def lived(folder: Path, *deaths: tuple[str, int, str] | float, staleness: int, evaluating: int = 0, seed: int = 0) -> Lives:
    lives = Lives(folder, staleness=staleness, evaluating=evaluating, seed=seed)

    async def main() -> None:
        async with lives.site.opened() as ring:
            await ring.serve(lives.train(ring, *deaths))

    run_virtual(main, seed=seed, max_seconds=20_000)
    lives.check()
    return lives


POINTS = {
    0: ["take 3 before", "take 3 after", "done 3 amid", "publish 4 amid", "checkpointed 2 after"],
    1: [
        *(
            "take 4 before",
            "take 4 after",
            "done 3 before",
            "done 3 amid",
            "done 3 after",
            "publish 1 amid",
            "publish 4 before",
        ),
        *("publish 4 amid", "checkpointed 2 before", "checkpointed 2 amid", "checkpointed 2 after"),
    ],
    4: ["take 4 after", "publish 4 amid", "checkpointed 2 before"],
}
"""By staleness: around the calls of the third step, of the first handover, and of the checkpoint after the fourth step."""


@pytest.mark.parametrize("staleness", POINTS)
def test_i1_to_i8_hold_wherever_in_a_step_the_trainer_is_lost(tmp_path: Path, staleness: int) -> None:
    for verb, number, when in ((verb, int(number), when) for verb, number, when in map(str.split, POINTS[staleness])):
        folder = tmp_path / f"{verb}-{number}-{when}"
        folder.mkdir()
        lives = lived(folder, (verb, number, when), staleness=staleness)
        assert lives.num_lost == 1, f"{when} {verb} {number} was never reached"
        (back,) = lives.site.seen.of(WentBack)
        seen = lives.site.seen
        live = [fact.version for fact in seen[: seen.index(back)] if isinstance(fact, WeightsCommitted)]
        assert back.version > max(live, default=-1) or back.version == back.checkpoint, "a number means one set of weights"
        assert lives.trainer.num_steps == NUM_STEPS


@pytest.mark.parametrize("seed", range(3))
def test_i1_to_i8_hold_after_any_number_of_losses_at_any_instant(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    deaths = [draw.uniform(0.0, 4.0) for _ in range(draw.randint(1, 4))]
    lived(tmp_path, *deaths, staleness=draw.choice((0, 1, 2, 4)), seed=seed)


@pytest.mark.parametrize("death", [("publish", 4, "amid"), ("finish", 1, "amid"), ("finish", 1, "after")])
def test_evaluations_are_each_of_one_version_though_the_trainer_is_lost_in_one(tmp_path: Path, death: tuple[str, int, str]) -> None:
    lives = lived(tmp_path, death, staleness=1, evaluating=2)
    scores = lives.site.seen.of(Evaluated)
    assert lives.num_lost == 1 and len({score.version for score in scores}) == len(scores) >= 3
