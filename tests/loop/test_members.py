"""A whole run on virtual time whose engines come, move, die and go at random instants, in the midst of handovers, pauses and drains."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import suppress
from pathlib import Path

import pytest

from midflight.config.sections import WeightsSection
from midflight.errors import EngineError, EngineRefused, EngineUnavailable, MemberConflict, UnknownEngine
from midflight.testing.script import Script
from midflight.testing.virtual_time import run_virtual
from midflight.types import PauseMode
from midflight.types.facts import EngineJoined, EngineLeft, Fact, Rejoined, RolloutEnded

from .joining import STALL_SECONDS, Arriving, Joinable, at
from .site import TOKENIZER, Agents, Site, config

NAMES = ["e0", "e1", "e2", "e3", "e4"]


class Comings:
    """Joins, moves, leaves, deaths, handovers that fail and operator's pauses. Somebody always serves, or comes back within seconds."""

    def __init__(self, site: Site, folder: Path, seed: int) -> None:
        self._site, self._folder, self._random = site, folder, random.Random(f"comings {seed}")
        self._numbers = itertools.count()
        self.num_refused = self.most_versions = self.most_engines = 0

    def arriving(self) -> Arriving:
        options = self._random.choice([{}, {"stage_seconds": 0.5}, {"stage_seconds": 0.2, "commit_seconds": 0.2}])
        script = Script(mean_length=8, by_version=True)
        return Arriving("new", script=script, tokenizer=TOKENIZER, step_seconds=0.05, chunk_tokens=3, **options)  # type: ignore[arg-type]

    async def run(self) -> None:
        """Waits between events; ended by its task group."""
        ring = self._site.ring
        assert ring is not None
        first = [engine for engine in self._site.engines if isinstance(engine, Arriving)]
        self._joinable = Joinable.of(ring.serving, first, self._folder, record=self._site._record, transport="file", drain_seconds=1.0)
        self._joinable.street.seconds = 0.05
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._joinable.run())
            while True:
                await asyncio.sleep(self._random.uniform(0.02, 0.6))
                deed = self._random.choice(
                    [self._join, self._join, self._leave, self._leave, self._move, self._die, self._fail, self._pause]
                )
                tasks.create_task(deed())

    def look(self, fact: Fact) -> None:
        """At every fact. An engine that is held for its commit serves nothing new."""
        ring = self._site.ring
        if ring is None:
            return
        states = ring.serving.fleet.states()
        serving = [state for state in states if state.error is None and "handover" not in state.held_by]
        self.most_versions = max(self.most_versions, len({state.version for state in serving}))
        self.most_engines = max(self.most_engines, len(states))
        assert all(state.num_requests == 0 or state.error is None or not state.is_new for state in states), "a joiner got a request"

    async def _join(self) -> None:
        await self._put(self._random.choice(NAMES), known=False)

    async def _move(self) -> None:
        await self._put(self._random.choice(NAMES), known=True)

    async def _put(self, name: str, *, known: bool) -> None:
        if (name in self._joinable.states()) is not known:
            return
        url, engine = f"http://{next(self._numbers)}", self.arriving()
        self._joinable.street.engines[url] = engine
        if self._random.random() < 0.2:
            engine.fail_next("stage", EngineUnavailable("staging: cut off."))
        try:
            await self._joinable.members.put(name, at(url))
        except (EngineRefused, MemberConflict):
            self.num_refused += 1

    async def _leave(self) -> None:
        with suppress(MemberConflict, UnknownEngine):
            await self._joinable.members.leave(self._random.choice(NAMES), force=False, drain_seconds=self._random.choice([None, 0, 0.2]))

    async def _die(self) -> None:
        engine = self._random.choice([known.engine for known in self._joinable.members._known.values()] or [None])
        if isinstance(engine, Arriving):
            engine.die()
            await asyncio.sleep(self._random.uniform(0.0, 2.0))
            if any(known.engine is engine for known in self._joinable.members._known.values()):
                engine.revive()

    async def _fail(self) -> None:
        for known in self._joinable.members._known.values():
            if self._random.random() < 0.3 and isinstance(known.engine, Arriving):
                known.engine.fail_next(self._random.choice(["stage", "commit"]), EngineError("no."))  # type: ignore[arg-type]

    async def _pause(self) -> None:
        if self._random.random() < 0.3:
            with suppress(EngineError):
                await self._site.control.pause(self._random.choice(list(PauseMode)))
                await asyncio.sleep(self._random.uniform(0.0, 1.0))
            await self._site.control.resume()


@pytest.mark.parametrize("way", ["rolling", "barrier"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_all_invariants_hold_while_engines_come_and_go_and_no_request_fails(tmp_path: Path, staleness: int, way: str) -> None:
    joined = left = spanning = 0
    for seed in range(1 if way == "barrier" else 2):

        async def main(seed: int = seed) -> tuple[Site, Comings]:
            folder = tmp_path / str(seed)
            folder.mkdir()
            made = config(staleness=staleness, steps=8).model_copy(update={"weights": WeightsSection(commit=way)})  # type: ignore[arg-type]
            site = Site(made, folder, agents=Agents(seed, longest=2), sdk=False)
            comings = Comings(site, folder, seed)
            site.engines = [comings.arriving() for _ in range(2)]
            for number, engine in enumerate(site.engines):
                engine.name = f"e{number}"
            site.on_fact = comings.look
            await site.run(comings.run(), step_seconds=0.4)
            return site, comings

        site, comings = run_virtual(main, seed=seed, max_seconds=20_000)
        site.check()
        assert not site.failed_requests and not [ended for ended in site.seen.of(RolloutEnded) if ended.error]
        assert comings.most_versions <= (1 if way == "barrier" else 2)
        joined, left = joined + len(site.seen.of(EngineJoined)), left + len(site.seen.of(EngineLeft))
        spanning += site.num_spanning
    assert joined > 1 and left > 1
    assert staleness == 0 or way == "barrier" or spanning > 0


def test_a_run_with_one_engine_shares_its_load_with_one_that_joins_and_does_without_it_when_it_is_gone(tmp_path: Path) -> None:
    async def main() -> Site:
        site = Site(config(staleness=1, steps=12), tmp_path, agents=Agents(1, longest=1), sdk=False)
        comings = Comings(site, tmp_path, 1)
        site.engines = [comings.arriving()]
        site.engines[0].name = "e0"

        async def beside() -> None:
            assert site.ring is not None
            first = [engine for engine in site.engines if isinstance(engine, Arriving)]
            joinable = Joinable.of(site.ring.serving, first, tmp_path, record=site._record, transport="file")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(joinable.run())
                await asyncio.sleep(1)
                second = joinable.street.engines["http://b"] = comings.arriving()
                await joinable.members.put("b", at("http://b"))
                await asyncio.sleep(20)
                assert joinable.states() == {"e0": "serving", "b": "serving"} and second.requests
                second.die()
                await asyncio.sleep(STALL_SECONDS + 11)
                assert joinable.states() == {"e0": "serving"}

        await site.run(beside(), step_seconds=8)
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert not site.failed_requests and site.seen.of(Rejoined)[0].engine == "b"
    assert [fact.engine for fact in site.seen.of(EngineLeft)] == ["b"]
