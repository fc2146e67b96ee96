"""Sessions spread over engines, simulated: many multi-turn sessions on several engines, with heavy-tailed answers, on virtual time."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import defaultdict
from itertools import pairwise

import pytest
from tests.gateway.generating import generated

from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.testing.script import Script
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import GenerateRequest, SamplingParams


class Site:
    """Sessions that come and go over `seconds`; each turn's prompt is everything said before it."""

    def __init__(self, *, seed: int, engines: int, seconds: float) -> None:
        self.random = random.Random(seed)
        self.seconds = seconds
        self.engines = [ScriptedEngine(f"e{k}", script=Script(mean_length=None), chunk_tokens=1024) for k in range(engines)]
        self.fleet = Fleet()
        for engine in self.engines:
            self.fleet.attach(engine)
        self.generator = Generator(self.fleet, request_seconds=600)
        self.skews: list[float] = []
        """Heaviest load over the mean, once a second."""

    async def session(self, number: int) -> None:
        """Ids begin with the session's number, so that the engines' records tell sessions apart."""
        await asyncio.sleep(self.random.uniform(0, self.seconds))
        ids = [97 + number // 26, 97 + number % 26, *[97] * 18]
        for turn in range(self.random.randint(3, 8)):
            tokens = min(400, int(20 * self.random.paretovariate(1.2)))
            request = GenerateRequest(f"{number}.{turn}", tuple(ids), len(ids), SamplingParams(max_tokens=tokens, ignore_eos=True))
            await generated(self.generator, request, affinity=str(number))
            ids += [97] * (tokens + 20)
            await asyncio.sleep(self.random.expovariate(1.0))

    async def watch(self) -> None:
        """The rush of the first seconds and the last stragglers are left out: there is no load to balance."""
        await asyncio.sleep(self.seconds / 4)
        while self.fleet.num_waiting or asyncio.get_running_loop().time() < self.seconds:
            loads = [state.tokens_in_flight for state in self.fleet.states()]
            self.skews.append(max(loads) / statistics.mean(loads))
            await asyncio.sleep(1)

    async def run(self, sessions: int) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watch())
            for number in range(sessions):
                group.create_task(self.session(number))

    def prefix_hits(self) -> float:
        """Share of later turns that went where the turn before them was."""
        turns: defaultdict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
        for engine in self.engines:
            for request in engine.requests:
                turns[request.input_ids[:2]].append((len(request.input_ids), engine.name))
        hits = [before[1] == after[1] for places in turns.values() for before, after in pairwise(sorted(places))]
        return statistics.mean(hits)


@pytest.mark.parametrize(("seed", "engines"), [(1, 2), (2, 4)])
def test_affinity_keeps_prefixes_while_load_stays_even(seed: int, engines: int) -> None:
    site = Site(seed=seed, engines=engines, seconds=60)
    run_virtual(site.run(250 * engines))
    assert site.prefix_hits() >= 0.9
    assert statistics.mean(site.skews) <= 1.3
