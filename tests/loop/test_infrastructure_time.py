"""A rollout is late by what its agent takes, never by what engines, pauses and restarts take (DECISIONS 48). Whole rings on virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from openai import AsyncOpenAI

from midflight.errors import EngineUnavailable
from midflight.run.rollout.standing import RolloutStanding
from midflight.testing.virtual_time import run_virtual
from midflight.types import Task
from midflight.types.facts import RolloutEnded

from .site import Agents, Site, config, fast_engines


def lost(site: Site) -> list[str]:
    return [ended.error for ended in site.seen.of(RolloutEnded) if ended.error]


def test_answers_that_grow_for_ten_times_the_agents_seconds_lose_no_rollout(tmp_path: Path) -> None:
    """`rollout_seconds` is 20, `request_seconds` 60; a token takes 25 s on the only engine."""

    async def main() -> Site:
        engines = fast_engines(1)
        engines[0].step_seconds = 25.0
        site = Site(config(staleness=1, steps=2), tmp_path, engines=engines, agents=Agents(1, longest=2))
        await site.run()
        return site

    site = run_virtual(main, seed=0)
    site.check()
    assert not lost(site)
    assert max(ended.seconds for ended in site.seen.of(RolloutEnded)) > 10 * 20


def test_an_outage_of_the_only_engine_of_a_hundred_seconds_loses_none_of_256_groups(tmp_path: Path) -> None:
    """The bar of issue 29. The engine dies three times, and comes back with the weights that it began with."""

    async def main() -> Site:
        site = Site(config(staleness=2, groups=16, steps=16), tmp_path, agents=Agents(2, longest=2), num_tasks=256, sdk=False)
        engine = site.engines[0]

        async def outages() -> None:
            for _ in range(3):
                await asyncio.sleep(1.0)
                engine.die()
                site.ring.serving.fleet.quarantine(engine.name, EngineUnavailable("it has died"))
                await asyncio.sleep(100)
                engine.revive()

        await site.run(outages())
        return site

    site = run_virtual(main, seed=0)
    site.check()
    assert not lost(site) and not site.failed_requests
    assert site.books.submitted >= 256 and not site.books.dropped.total()
    assert max(ended.seconds for ended in site.seen.of(RolloutEnded)) > 100


class Endless:
    """An agent that asks for ever."""

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float:
        while True:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": str(task.data["question"])}])


def test_an_agent_that_asks_for_ever_is_ended_by_a_bound_from_the_rate_that_was_measured(tmp_path: Path) -> None:
    """A token takes 0.5 s, so that 100 turns of at most 16 tokens take 800 s: 4 * (20 + 800) s with the agent's own, at most."""

    async def main() -> tuple[Site, float]:
        engines = fast_engines(1)
        engines[0].step_seconds = 0.5
        made = config(staleness=0, groups=1)
        made = made.model_copy(update={"environment": made.environment.model_copy(update={"entry": "mine:endless"})})
        site = Site(made, tmp_path, engines=engines, agents=Endless(), sdk=False)
        async with site.opened() as ring:

            async def until_ended() -> None:
                while not lost(site):
                    await asyncio.sleep(10)

            await ring.serve(until_ended())
            return site, ring.serving.gateway.pace.tokens_per_second or 0.0

    site, rate = run_virtual(main, seed=0)
    assert 1.6 < rate <= 2.01
    error = lost(site)[0]
    assert "are the last bound: 4 x (20 s of its agent and 100 turns of" in error and "(measured)" in error
    assert min(ended.seconds for ended in site.seen.of(RolloutEnded)) <= 4 * (20 + 100 * 16 / 1.6)


def test_the_report_says_what_the_oldest_rollout_waits_for(tmp_path: Path) -> None:
    async def main() -> tuple[str, str]:
        engines = fast_engines(1)
        engines[0].step_seconds = 10.0
        site = Site(config(staleness=1), tmp_path, engines=engines, agents=Agents(1, longest=0.01))
        async with site.opened() as ring:
            standing = RolloutStanding(ring.serving, clock=asyncio.get_running_loop().time)
            standing.watch(ring.agents)
            said: list[str] = []

            async def looked() -> None:
                await asyncio.sleep(35)
                said.append(standing.now().counters)
                ring.serving.fleet.quarantine(engines[0].name, EngineUnavailable("its cable was cut"))
                said.append(standing.now().counters)

            await ring.serve(looked())
            return said[0], said[1]

    answering, away = run_virtual(main, seed=0)
    assert "waits for the answer to request 1, 3 tokens so far" in answering
    assert "waits for an engine that takes requests" in away
