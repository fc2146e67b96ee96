"""Two gateways with the same engines, on virtual time: each holds the bound on age for itself, and the death of one is its own affair."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import pytest
from tests.facts import Facts

from midflight.archive.ledger import ledger_of
from midflight.config.sections import EvaluationSection
from midflight.config.shards import shard_of
from midflight.errors import UnknownLease
from midflight.run.api.service import WentOn
from midflight.run.parts import PartLost
from midflight.run.rollout.version_followers import FleetVersions, ShardRole
from midflight.run.trainer.shards import ShardedRollouts
from midflight.run.trainer.training import TrainingLoop
from midflight.testing.ring import SimulatedTrainer, SlowSteps, SmallRing, open_ring
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.segments import SEGMENTS
from midflight.types import PackedBatch, Task, Version, WeightManifest
from midflight.types.facts import Evaluated, Fact, Leased, RequestFailed, Stepped, VersionServed

from .site import TOKENIZER, Agents, config, direct_client, fast_engines, source

T = TypeVar("T")
STEPS, GROUPS, SHARDS = 6, 4, 2
HELD_OUT = tuple(Task(f"h{i}", "numbers", {"question": f"held out {i}"}) for i in range(2))


def not_of_the_store(at: str, names: list[str]) -> list[str]:
    if Path(at).name == SEGMENTS:
        return []
    return [name for name in names if not name.startswith("store.sqlite") and name != SEGMENTS]


class Killed(Exception):
    """The instant of death."""


class Process:
    """One shard in all its lives, as the trainer reaches it: what was asked when it died is asked again."""

    def __init__(self, number: int, folder: Path, engines: list[ScriptedEngine], *, staleness: int, first: Process | None) -> None:
        made = config(staleness=staleness, groups=GROUPS, steps=STEPS, every=2)
        update = {"gateway": made.gateway.model_copy(update={"shards": SHARDS}), "evaluation": EvaluationSection(eval_every=3)}
        self.config = shard_of(made.model_copy(update={**update, "run": made.run.model_copy(update={"folder": folder})}), number)
        self.folder, self.engines, self.first = Path(self.config.run.folder), engines, first
        self.agents, self.role = Agents(number, longest=1.5), ShardRole(number, None if first is None else self._ask)
        self.sources = [replace(source(), heldout=HELD_OUT if first is None else ())]
        self.seen, self.ring = Facts(), None
        self._up, self._down, self._death = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._down.set()
        self.num_lives = 0
        self._delay = random.Random(number)

    def _record(self, fact: Fact) -> None:
        self.seen.append(fact)

    async def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.num_lives += 1
            try:
                await self._live()
            except* Killed:
                self.role = replace(self.role, again=True)

    async def _live(self) -> None:
        opened = open_ring(
            self.config,
            self.engines,
            tokenizer=TOKENIZER,
            sources=self.sources,
            environment=self.agents,
            folder=self.folder,
            record=self._record,
            client_for=direct_client,
            role=self.role,
        )
        async with opened as self.ring:
            self._down.clear()
            self._up.set()
            await self.ring.serve(self._dies())

    async def _dies(self) -> None:
        """What this life still does when it has died, such as the writer's last words, is in a folder that nobody reads again."""
        await self._death.wait()
        self._death.clear()
        self._up.clear()
        self._down.set()
        grave = self.folder.with_name(f"{self.folder.name}-grave-{self.num_lives}")
        shutil.copytree(self.folder, grave, ignore=not_of_the_store)
        self.folder = grave
        raise Killed

    def kill(self) -> None:
        self._death.set()

    async def _ask(self, serial: str) -> FleetVersions:
        """Of the first, which may be away; news take their time."""
        await asyncio.sleep(self._delay.uniform(0, 0.5))
        assert self.first is not None
        if not self.first._up.is_set():
            raise PartLost("the first gateway is away")
        found = await self.first._while_up(lambda ring: ring.serving.version_feed.after(serial))  # type: ignore[union-attr]
        if found is None:
            raise PartLost("the first gateway went away")
        return found

    async def _while_up(self, ask: Callable[[SmallRing], Awaitable[T]]) -> T | None:
        assert self.ring is not None

        async def asked(ring: SmallRing) -> T:
            return await ask(ring)

        answer, down = asyncio.ensure_future(asked(self.ring)), asyncio.ensure_future(self._down.wait())
        try:
            await asyncio.wait({answer, down}, return_when=asyncio.FIRST_COMPLETED)
            return None if down.done() else answer.result()
        finally:
            for task in (answer, down):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _asked(self, ask: Callable[[SmallRing], Awaitable[T]]) -> T:
        async def wrapped(ring: SmallRing) -> tuple[T]:
            return (await ask(ring),)

        while True:
            await self._up.wait()
            if (found := await self._while_up(wrapped)) is not None:
                return found[0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def take(self, train_version: Version) -> PackedBatch:
        return await self._asked(lambda ring: ring.system.take(train_version))

    async def done(self, step: Stepped) -> None:
        async def once(ring: SmallRing) -> None:
            with suppress(UnknownLease):  # as `StepBook`: the report of before its death was kept, and its answer lost
                await ring.system.done(step)

        await self._asked(once)

    async def publish(self, manifest: WeightManifest) -> None:
        await self._asked(lambda ring: ring.system.publish(manifest))

    async def checkpointed(self, version: Version) -> None:
        await self._asked(lambda ring: ring.system.checkpointed(version))

    async def finish(self, version: Version) -> None:
        await self._asked(lambda ring: ring.system.finish(version))

    async def restart(self, checkpoint: Version, *, least: Version = 0) -> WentOn:
        return WentOn(await self._asked(lambda ring: ring.system.restart(checkpoint, least=least)))


class Whole:
    """A run of both, whose facts are kept."""

    def __init__(self, folder: Path, *, staleness: int, deaths: dict[int, list[float]] | None = None) -> None:
        self.engines = fast_engines(2, by_version=True)
        first = Process(0, folder, self.engines, staleness=staleness, first=None)
        self.shards = [first, Process(1, folder, self.engines, staleness=staleness, first=first)]
        self.trainer, self.folder, self.staleness, self._deaths = SimulatedTrainer(), folder, staleness, deaths or {}

    async def run(self) -> Self:
        service = SlowSteps(ShardedRollouts(self.shards), seconds=lambda: 0.4)
        prefetch = self.staleness > 0
        loop = TrainingLoop(
            self.trainer, self.trainer, service, steps=STEPS, prefetch=prefetch, stage=lambda: lambda: None, save_every=2
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(shard.run()) for shard in self.shards]
            beside += [tasks.create_task(self._kill(number, at)) for number, times in self._deaths.items() for at in times]
            await loop.run()
            for task in beside:
                task.cancel()
        return self

    async def _kill(self, number: int, at: float) -> None:
        await asyncio.sleep(at)
        self.shards[number].kill()

    def check(self) -> None:
        """I1 to I3, I8; and that the groups of a step are of both in equal parts, which share none."""
        assert len(self.trainer.batches) == STEPS
        for batch in self.trainer.batches:
            ages = batch.train_version - batch.versions[batch.loss_mask]
            assert ages.min() >= 0 and ages.max() <= self.staleness
            assert int(batch.rollout_group.max()) + 1 == GROUPS
        places = Counter[tuple[int, int]]()
        for number, shard in enumerate(self.shards):
            with sqlite3.connect(shard.folder / "store.sqlite") as file:
                found = file.execute(
                    "SELECT epoch, position, state FROM groups LEFT JOIN leases USING (lease) WHERE state = 'trained' OR done"
                )
                mine = [(epoch, position) for epoch, position, _ in found]
            assert len(mine) == STEPS * GROUPS // SHARDS and all((epoch * 64 + place) % SHARDS == number for epoch, place in mine)
            places.update(mine)
            assert not shard.seen.of(RequestFailed)
            books = shard.ring.system.books  # type: ignore[union-attr]
            assert not books.tokens.masked and not books.dropped
        assert set(places.values()) == {1}, "a prompt was trained twice"


@pytest.mark.parametrize(("staleness", "seed"), [(0, 0), (2, 1), (2, 5), (2, 6), (2, 7)])
def test_i2_the_bound_on_age_holds_shard_by_shard(tmp_path: Path, staleness: int, seed: int) -> None:
    whole = run_virtual(lambda: Whole(tmp_path, staleness=staleness).run(), seed=seed, max_seconds=3600)
    whole.check()
    first, second = whole.shards
    served, heard = ([fact.version for fact in shard.seen.of(VersionServed)] for shard in whole.shards)
    # What the first says takes up to half a second: two versions may be heard as one, and the last one after the end.
    assert heard == sorted(set(heard)) and set(heard) <= set(served) and heard[-1] >= STEPS - 1
    assert {fact.version for fact in first.seen.of(Evaluated)} >= {0, STEPS} and not second.seen.of(Evaluated)
    assert [len(lease.batch.groups) for lease in second.seen.of(Leased)] == [GROUPS // SHARDS] * STEPS
    found = ledger_of(tmp_path)
    assert found.balanced and found.accounts.trained == STEPS * GROUPS, "both stores are read as one"


@pytest.mark.parametrize(("dies", "seed"), [(0, 0), (1, 1)])
def test_i8_a_shard_that_dies_goes_on_from_its_store_and_the_other_never_notices(tmp_path: Path, dies: int, seed: int) -> None:
    deaths = {dies: [random.Random(seed).uniform(0.2, 2.0), 2.5 + seed]}
    folder = tmp_path / "run"
    whole = run_virtual(lambda: Whole(folder, staleness=1, deaths=deaths).run(), seed=seed, max_seconds=3600)
    whole.check()
    assert whole.shards[dies].num_lives == 3 and whole.shards[1 - dies].num_lives == 1
