"""Engines and trainer that have a device in turns: in a step no engine has any of it, and everything else is as it always is."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from midflight.config.sections import Config, EngineSection, EvaluationSection, WeightsSection
from midflight.environments.sources import Source
from midflight.errors import EngineError, RequestRejected
from midflight.run.api.service import DeviceOwner
from midflight.testing.ring import SimulatedTrainer
from midflight.testing.virtual_time import run_virtual
from midflight.types import MemoryPart, PackedBatch, Task
from midflight.types.facts import Evaluated, WeightsCommitted

from .site import Agents, Site, config, fast_engines

ASLEEP = set(MemoryPart)


def in_turns(**options: object) -> Config:
    return config(**options).model_copy(update={"engine": EngineSection(share="time")})  # type: ignore[arg-type]


def watched(site: Site) -> list[int]:
    """The number of engines that slept in each step. A dead one has no memory."""
    found: list[int] = []

    def on_step(_: PackedBatch) -> None:
        found.append(sum(engine.asleep == ASLEEP or engine._dead for engine in site.engines))

    site.trainer = SimulatedTrainer(on_step=on_step)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("staleness", "number"), [(0, 1), (1, 2), (4, 3)])
def test_i1_to_i6_all_engines_sleep_in_every_step_and_no_request_fails(tmp_path: Path, staleness: int, number: int, seed: int) -> None:
    async def main() -> tuple[Site, list[int]]:
        site = Site(in_turns(staleness=staleness), tmp_path, engines=fast_engines(number, by_version=True), agents=Agents(seed))
        found = watched(site)
        await site.run()
        return site, found

    site, found = run_virtual(main, seed=seed, max_seconds=3600)
    site.check()
    assert not site.failed_requests
    assert found == [number] * 6
    assert not any(engine.asleep for engine in site.engines)
    assert {fact.version for fact in site.seen.of(WeightsCommitted)} == set(range(7))


def test_the_weights_wake_first_then_the_version_comes_then_the_keys(tmp_path: Path) -> None:
    async def main() -> list[str]:
        site = Site(in_turns(steps=1), tmp_path, agents=Agents(1))
        order: list[str] = []
        engine = site.engines[0]
        for verb in ("sleep", "stage", "commit"):
            note_calls(engine, verb, order)
        wake = engine.wake

        async def waking(part: MemoryPart) -> None:
            order.append(f"wake {part}")
            await wake(part)

        engine.wake = waking  # type: ignore[method-assign]
        await site.run()
        return order

    order = run_virtual(main, seed=0, max_seconds=3600)
    assert order == ["stage", "commit", "sleep", "wake weights", "stage", "commit", "wake keys"]


def note_calls(engine: object, verb: str, order: list[str]) -> None:
    plain = getattr(engine, verb)

    async def noted(*given: object) -> object:
        order.append(verb)
        return await plain(*given)

    setattr(engine, verb, noted)


@pytest.mark.parametrize("seed", range(6))
def test_i5_i7_engines_that_die_and_come_back_at_any_time_lose_nothing(tmp_path: Path, seed: int) -> None:
    """Also while they sleep, and while they wake. One that comes back in the trainer's turn is put to sleep again."""

    async def main() -> tuple[Site, list[int]]:
        site = Site(in_turns(staleness=2, steps=8), tmp_path, engines=fast_engines(3, by_version=True), agents=Agents(seed))
        found = watched(site)
        draw = random.Random(seed)

        async def kill() -> None:
            while True:
                await asyncio.sleep(draw.uniform(0.1, 2.0))
                engine = draw.choice(site.engines)
                engine.die()
                await asyncio.sleep(draw.uniform(0.0, 3.0))
                engine.revive()

        await site.run(kill())
        return site, found

    site, found = run_virtual(main, seed=seed, max_seconds=3600)
    site.check()
    assert not site.failed_requests
    assert len(found) == 8


@pytest.mark.parametrize("every", [2, 3])
def test_engines_wake_as_they_were_where_a_step_publishes_no_version(tmp_path: Path, every: int) -> None:
    async def main() -> tuple[Site, list[int]]:
        made = in_turns(staleness=2).model_copy(update={"weights": WeightsSection(every=every)})
        site = Site(made, tmp_path, engines=fast_engines(2, by_version=True), agents=Agents(3))
        found = watched(site)
        await site.run()
        return site, found

    site, found = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert not site.failed_requests
    assert found == [2] * 6


def test_i7_engines_wake_for_a_trainer_that_died_and_answer_with_the_version_before(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(in_turns(), tmp_path, engines=fast_engines(2, by_version=True), agents=Agents(2))
        async with site.opened() as ring:

            async def lost() -> None:
                system = ring.system
                await system.publish(site.trainer.publish(0))
                await system.take(0)
                await system.turn(DeviceOwner.TRAINER)
                assert all(engine.asleep == ASLEEP for engine in site.engines)
                before = sum(len(turns) for turns in site.turns.values())
                await asyncio.sleep(30)
                assert sum(len(turns) for turns in site.turns.values()) == before, "nobody answers meanwhile"
                await system.turn(DeviceOwner.ENGINES)
                assert not any(engine.asleep for engine in site.engines)
                await asyncio.sleep(30)
                assert sum(len(turns) for turns in site.turns.values()) > before
                assert not site.failed_requests

            await ring.serve(lost())

    run_virtual(main, seed=0, max_seconds=3600)


def test_a_trainer_that_asks_again_gets_its_turn_again_and_a_cut_request_leaves_none_half_asleep(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(in_turns(), tmp_path, engines=fast_engines(3), agents=Agents(2))
        async with site.opened() as ring:

            async def asks() -> None:
                system = ring.system
                await system.publish(site.trainer.publish(0))
                site.engines[1].hang_next("sleep")
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await system.turn(DeviceOwner.TRAINER)
                await system.turn(DeviceOwner.TRAINER)
                await system.turn(DeviceOwner.TRAINER)
                assert all(engine.asleep == ASLEEP for engine in site.engines)
                await system.turn(DeviceOwner.ENGINES)
                await system.turn(DeviceOwner.ENGINES)
                assert not any(engine.asleep for engine in site.engines)
                assert ring.serving.routable()

            await ring.serve(asks())

    run_virtual(main, seed=0, max_seconds=3600)


@pytest.mark.parametrize("number", [1, 2])
def test_evaluations_along_the_run_end_though_their_engine_sleeps_in_between(tmp_path: Path, number: int) -> None:
    async def main() -> Site:
        made = in_turns(steps=6, staleness=1).model_copy(update={"evaluation": EvaluationSection(eval_every=2)})
        site = Site(made, tmp_path, engines=fast_engines(number, by_version=True), agents=Agents(4))
        site.sources = [held_out(site)]
        found = watched(site)
        await site.run()
        assert found == [number] * 6
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check_groups()
    assert not site.failed_requests
    scores = site.seen.of(Evaluated)
    assert {fact.version for fact in scores} >= {0, 6}


def held_out(site: Site) -> Source:
    return replace(site.sources[0], heldout=tuple(Task(f"h{i}", "numbers", {"question": f"held out {i}"}) for i in range(2)))


def test_an_engine_that_refuses_to_sleep_keeps_the_trainer_from_its_turn_and_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(in_turns(), tmp_path, engines=fast_engines(2), agents=Agents(2))
        async with site.opened() as ring:

            async def asks() -> None:
                site.engines[0].fail_next("sleep", EngineError("sleeping: it has no such route."))
                with pytest.raises(EngineError, match="it has no such route"):
                    await ring.system.turn(DeviceOwner.TRAINER)
                await ring.system.turn(DeviceOwner.TRAINER)
                await ring.system.turn(DeviceOwner.ENGINES)
                assert ring.serving.routable()

            await ring.serve(asks())

    run_virtual(main, seed=0, max_seconds=3600)


def test_engines_that_commit_together_wake_together(tmp_path: Path) -> None:
    async def main() -> Site:
        made = in_turns(staleness=2).model_copy(update={"weights": WeightsSection(commit="barrier")})
        site = Site(made, tmp_path, engines=fast_engines(3, by_version=True), agents=Agents(3))
        found = watched(site)
        await site.run()
        assert found == [3] * 6
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert not site.failed_requests


def test_a_turn_is_refused_where_devices_are_not_shared_in_turns(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(config(), tmp_path)
        async with site.opened() as ring:
            with pytest.raises(RequestRejected, match=r'set engine\.share = "time" or do not ask for one'):
                await ring.system.turn(DeviceOwner.TRAINER)

    run_virtual(main, seed=0, max_seconds=60)
