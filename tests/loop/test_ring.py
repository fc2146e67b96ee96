"""The whole rollout side and the trainer's loop on virtual time: what holds of every run, whatever happens in it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from midflight.testing.virtual_time import run_virtual

from .site import Agents, Site, config, fast_engines


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_i2_i3_i5_a_quiet_run_keeps_every_invariant(tmp_path: Path, staleness: int, seed: int) -> None:
    async def main() -> Site:
        site = Site(config(staleness=staleness), tmp_path, engines=fast_engines(2, by_version=True), agents=Agents(seed))
        await site.run()
        return site

    site = run_virtual(main, seed=seed, max_seconds=3600)
    site.check()
    assert not site.failed_requests


@pytest.mark.parametrize("seed", range(4))
def test_i3_i10_an_environment_that_fails_costs_its_rollout_and_never_becomes_a_reward(tmp_path: Path, seed: int) -> None:
    async def main() -> Site:
        site = Site(config(staleness=1, size=3, min_group_size=2), tmp_path, engines=fast_engines(2), agents=Agents(seed, failing=0.3))
        await site.run()
        return site

    site = run_virtual(main, seed=seed, max_seconds=3600)
    site.check()
    assert isinstance(site.agents, Agents) and site.agents.num_failed > 3
    assert not site.failed_requests


def test_i9_an_environment_that_hangs_is_ended_by_its_deadline_and_the_run_goes_on(tmp_path: Path) -> None:
    async def main() -> tuple[Site, float]:
        site = Site(config(staleness=1, size=3), tmp_path, agents=Agents(2, hanging=0.1, longest=5))
        await site.run()
        return site, asyncio.get_running_loop().time()

    site, seconds = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert isinstance(site.agents, Agents) and site.agents.num_hung > 2
    assert seconds < 6 * (20 + 20 + 5), "a step waits for a hung rollout and its retry, no longer"
