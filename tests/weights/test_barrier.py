"""One after the other or all together, and never half of it (I7): what each way keeps, and what it costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, TypeAlias

import pytest
from tests.gateway.generating import generated

from midflight.errors import EngineError, EngineUnavailable, MidflightError
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.run.rollout.serving import Rejoin
from midflight.testing.script import Script
from midflight.testing.scripted import Call, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Attestation, Chunk, GenerateRequest, PauseMode, SamplingParams
from midflight.types.facts import record_nothing
from midflight.weights.handover import Handover

from .fleets import RecordingFleet, manifest

Way: TypeAlias = Literal["rolling", "barrier"]
CALLS: list[Call] = ["stage", "pause", "health", "commit", "resume"]


def handover(fleet: object, way: Way, *, mode: PauseMode | Literal["auto"] = "auto") -> Handover:
    return Handover(fleet, pause_mode=mode, way=way, stage_seconds=5.0, commit_seconds=2.0, record=record_nothing)


# --- Versions side by side -------------------------------------------------------------------------------------------


class Sampled:
    """Every token of every engine, in order of time, while versions are published and engines fail."""

    def __init__(self, way: Way, seed: int) -> None:
        self._random, self._way = random.Random(seed), way
        self.tokens: list[tuple[str, int]] = []
        self.num_served = 0

    async def run(self) -> None:
        engines = [self._engine(name) for name in "abc"]
        fleet = Fleet()
        for engine in engines:
            fleet.attach(engine)
        generator = Generator(fleet, request_seconds=1000.0)
        h = handover(fleet, self._way, mode=self._random.choice(["auto", *PauseMode]))
        async with asyncio.TaskGroup() as group:
            rest = [group.create_task(_ask(generator, number)) for number in range(6)]
            rest.append(group.create_task(Rejoin(fleet, h).run()))
            for version in range(1, 5):
                self._disturb(self._random.choice(engines))
                self.num_served += len((await h.publish(manifest(version))).served_by)
                await asyncio.sleep(self._random.random())
            for task in rest:
                task.cancel()

    def _engine(self, name: str) -> ScriptedEngine:
        pace = {"step_seconds": 0.01 * self._random.randint(1, 5), "commit_seconds": self._random.random() / 4}
        engine = ScriptedEngine(name, script=Script(mean_length=30), stage_seconds=self._random.random(), **pace)

        def listening(chunk: Chunk) -> Iterable[Chunk]:
            self.tokens += [(name, chunk.version)] * len(chunk.token_ids)
            return (chunk,)

        engine.mangle = listening
        return engine

    def _disturb(self, engine: ScriptedEngine) -> None:
        call = self._random.choice(CALLS)
        match self._random.choice(["fail", "hang", "corrupt", "ignore", "ignore"]):
            case "fail":
                engine.fail_next(call, EngineError("as ordered"))
            case "hang":
                engine.hang_next(call)
            case "corrupt":
                engine.corrupt_next_commit()
            case _:
                engine.ignores_pause = True  # from now on

    def num_backwards(self) -> int:
        """Tokens of a version older than one that another engine has sampled before."""
        newest, found = 0, 0
        for _, version in self.tokens:
            found += version < newest
            newest = max(newest, version)
        return found


async def _ask(generator: Generator, number: int) -> None:
    """One request after the other; ended by cancelling it."""
    request = GenerateRequest(f"r{number}", (number, 2), 2, SamplingParams(max_tokens=60, seed=number))
    while True:
        with suppress(MidflightError):
            await generated(generator, request, affinity=str(number))


def _sampled(way: Way, seed: int) -> Sampled:
    sampled = Sampled(way, seed)
    run_virtual(sampled.run(), seed=seed)
    return sampled


@pytest.mark.parametrize("seeds", [range(4), range(4, 8)], ids=str)
def test_at_a_barrier_no_token_of_a_version_comes_after_one_of_the_next_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        sampled = _sampled("barrier", seed)
        assert sampled.num_served > 4 and len({version for _, version in sampled.tokens}) > 2
        assert sampled.num_backwards() == 0


def test_engines_that_take_turns_serve_two_versions_at_the_same_time() -> None:
    assert all(_sampled("rolling", seed).num_backwards() > 0 for seed in range(3))


# --- Turns -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_slow_to_stage_keeps_no_other_from_the_new_version() -> None:
    async def main() -> None:
        slow, fast = ScriptedEngine("slow", stage_seconds=4.0), ScriptedEngine("fast", stage_seconds=0.5)
        fleet = RecordingFleet(slow, fast)
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(handover(fleet, "rolling", mode=PauseMode.RECOMPUTE).publish(manifest(1)))
            await asyncio.sleep(1.0)
            assert fleet.versions == {"slow": 0, "fast": 1}
            fleet.check_whole()
        assert publishing.result().served_by == ("fast", "slow")

    run_virtual(main())


@pytest.mark.parametrize(("number", "most"), [(8, 1), (64, 1), (65, 2), (130, 3)])
def test_in_turn_one_of_each_64_engines_is_paused_at_once(number: int, most: int) -> None:
    """Commits of half a second each; no request sees a third version."""

    async def main() -> None:
        engines = [ScriptedEngine(f"e{k}", commit_seconds=0.5) for k in range(number)]
        fleet = RecordingFleet(*engines)
        at_once, served = list[int](), set[int]()
        async with asyncio.TaskGroup() as group:
            coming = handover(fleet, "rolling", mode=PauseMode.RECOMPUTE).publish(manifest(1))
            publishing = group.create_task(coming)
            while not publishing.done():
                at_once.append(sum(engine.paused is not None for engine in engines))
                served |= set(fleet.versions.values())
                await asyncio.sleep(0.1)
        assert max(at_once) == most
        assert asyncio.get_running_loop().time() == pytest.approx(0.5 * -(-number // most), abs=0.15)
        assert served == {0, 1} and set(fleet.versions.values()) == {1}
        fleet.check_whole()

    run_virtual(main())


def test_in_turn_an_engine_that_hangs_in_its_commit_delays_only_those_after_it_by_its_deadline() -> None:
    async def main() -> None:
        a, b, c = (ScriptedEngine(name, stage_seconds=at) for name, at in (("a", 0.0), ("b", 0.1), ("c", 0.2)))
        b.hang_next("commit")
        fleet = RecordingFleet(a, b, c)
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(handover(fleet, "rolling", mode=PauseMode.RECOMPUTE).publish(manifest(1)))
            await asyncio.sleep(1.0)
            assert [e.served.version for e in (a, b, c)] == [1, 0, 0]
            assert [e.paused for e in (a, b, c)] == [None, PauseMode.RECOMPUTE, None], "one at a time"
        assert publishing.result().served_by == ("a", "c")
        assert asyncio.get_running_loop().time() == pytest.approx(0.1 + 2.0)
        fleet.check_whole()

    run_virtual(main())


# --- Together --------------------------------------------------------------------------------------------------------


def test_engines_that_swap_between_steps_are_paused_at_a_barrier_unless_one_is_alone() -> None:
    async def main() -> None:
        a, b = ScriptedEngine("a"), ScriptedEngine("b")
        await handover(RecordingFleet(a, b), "barrier").publish(manifest(1))
        assert [list(e.calls) for e in (a, b)] == [["stage", "pause", "health", "commit", "health", "resume"]] * 2
        alone = ScriptedEngine("alone")
        await handover(RecordingFleet(alone), "barrier").publish(manifest(1))
        assert list(alone.calls) == ["stage", "commit", "resume"]

    run_virtual(main())


def test_what_an_engine_waits_for_others_does_not_count_against_its_own_deadline() -> None:
    async def main() -> None:
        a, b = ScriptedEngine("a"), ScriptedEngine("b", commit_seconds=1.5)
        a.hang_next("pause")
        fleet = RecordingFleet(a, b)
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(handover(fleet, "barrier").publish(manifest(1)))
            await asyncio.sleep(1.9)
            assert b.paused is not None and "commit" not in b.calls, "nobody commits before all are paused"
        report = publishing.result()
        assert asyncio.get_running_loop().time() == 2.0 + 1.5
        assert report.served_by == ("b",)
        assert list(report.quarantined) == ["a"]
        fleet.check_whole()

    run_virtual(main())


def test_a_barrier_waits_for_three_deadlines_at_most_where_an_engine_hangs_in_each_phase() -> None:
    async def main() -> None:
        engines = {name: ScriptedEngine(name) for name in ("pause", "commit", "resume", "well")}
        for call in ("pause", "commit", "resume"):
            engines[call].hang_next(call)
        fleet = RecordingFleet(*engines.values())
        report = await handover(fleet, "barrier").publish(manifest(1))
        assert report.served_by == ("well",)
        assert set(report.quarantined) == {"pause", "commit", "resume"}
        assert asyncio.get_running_loop().time() == 3 * 2.0
        assert engines["well"].served == Attestation(1, "print-1")
        fleet.check_whole()

    run_virtual(main())


def test_an_engine_that_refuses_its_pause_delays_nobody_at_a_barrier() -> None:
    async def main() -> None:
        a, b, c = (ScriptedEngine(name) for name in "abc")
        b.fail_next("pause", EngineUnavailable("gone"))
        fleet = RecordingFleet(a, b, c)
        report = await handover(fleet, "barrier", mode=PauseMode.ABORT).publish(manifest(1))
        assert report.served_by == ("a", "c")
        assert asyncio.get_running_loop().time() == 0.0
        fleet.check_whole()

    run_virtual(main())
