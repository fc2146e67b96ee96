"""A training run whose rollouts are claimed by workers outside, some of which die: nothing else changes (I1, I2, I3, I10)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from midflight.config.sources import SourceSection
from midflight.environments.claimed import Claimed, claims
from midflight.environments.tasks import posted_tasks
from midflight.gateway.sessions.session import CompletionCall, Messages
from midflight.observe.activity import ProcessWork
from midflight.run.heartbeat import Beat, Doing
from midflight.run.launcher.watchdog import Watchdog
from midflight.run.rollout.standing import RolloutStanding
from midflight.testing.virtual_time import run_virtual
from midflight.types import Result
from midflight.types.facts import RolloutEnded

from .site import Site, config


class Workers:
    """They claim, talk to the policy, and post a reward; one in `dies` is silent for ever after its claim."""

    def __init__(self, environment: Claimed, *, dies: float) -> None:
        self._environment, self._dies = environment, dies
        self._random = random.Random(5)
        self.num_silent = 0
        self.rewards: dict[str, float] = {}
        self.claimed: list[str] = []

    async def run(self, site: Site) -> None:
        """Claims until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for offer in await claims(self._environment.board, most=3, wait_seconds=600):
                    self.claimed.append(offer.session_id)
                    if self._random.random() < self._dies:
                        self.num_silent += 1
                    else:
                        tasks.create_task(self._work(site, offer.session_id, offer.api_key))

    async def _work(self, site: Site, session_id: str, api_key: str) -> None:
        assert site.ring is not None
        gateway = site.ring.serving.gateway
        await asyncio.sleep(self._random.random())
        call = CompletionCall((Messages(({"role": "user", "content": session_id},)),))
        await gateway.answers(gateway.prepare(gateway.session_for(path_token=None, api_key=api_key), call))
        self.rewards[session_id] = self._random.random()
        self._environment.board.score(session_id, self.rewards[session_id])


def test_i10_a_run_fed_by_workers_trains_what_they_scored_and_a_silent_one_costs_an_attempt(tmp_path: Path) -> None:
    async def main() -> tuple[Site, Workers]:
        environment = Claimed()
        workers = Workers(environment, dies=0.1)
        site = Site(config(steps=8, size=4, retries=1), tmp_path, agents=environment, sdk=True)
        async with site.opened() as ring:
            await ring.train(site.trainer, site.trainer, workers.run(site))
        assert (environment.board.num_offered, environment.board.num_claimed) == (0, 0)
        return site, workers

    site, workers = run_virtual(main)
    site.check_groups()
    site.check_ages()
    site.check_fates()
    assert workers.num_silent > 2 and len(workers.claimed) == len(set(workers.claimed)), "an attempt is claimed once"
    finished = site.seen.of(RolloutEnded)
    unscored = [fact for fact in finished if fact.reward is None]
    assert unscored and all("RolloutTimeout" in (fact.error or "") for fact in unscored)
    trained = [t.reward for batch in site.taken for group in batch.groups for t in group.trajectories]
    assert len(trained) >= 8 * 2 * 2 and set(trained) <= set(workers.rewards.values())


def test_a_harness_posts_its_own_tasks_and_says_of_each_what_its_reward_is_made_of(tmp_path: Path) -> None:
    async def main() -> Site:
        environment = Claimed()
        site = Site(config(steps=2), tmp_path, agents=environment)
        site.sources, site.posted = [], posted_tasks([SourceSection(posted=True)], tmp_path)

        async def harness() -> None:
            assert site.ring is not None
            gateway = site.ring.serving.gateway
            site.ring.system.post([{"question": f"of the harness {number}", "number": number} for number in range(4)])
            while True:
                for offer in await claims(environment.board, most=8, wait_seconds=600):
                    call = CompletionCall((Messages(({"role": "user", "content": str(offer.task.data["question"])},)),))
                    for token in (offer.api_key, f"{offer.api_key}~critic"):
                        await gateway.answers(gateway.prepare(gateway.session_for(path_token=token, api_key=None), call))
                    number = float(offer.task.data["number"])  # type: ignore[arg-type]
                    environment.board.score(offer.session_id, Result(number, {"right": number}, {"tries": 1.0}, roles={"critic": -number}))

        async with site.opened() as ring:
            await ring.train(site.trainer, site.trainer, harness())
        return site

    site = run_virtual(main)
    site.check_groups()
    site.check_fates()
    trained = [t for batch in site.taken for group in batch.groups for t in group.trajectories]
    assert {(t.reward, t.components["right"], t.roles["critic"].reward) for t in trained} == {(n, n, -n) for n in (0.0, 1.0, 2.0, 3.0)}
    assert all(t.metrics == {"tries": 1.0, "roles/critic": -(t.reward or 0)} for t in trained)


def test_a_take_that_may_not_wait_looks_once_and_finds_the_batch_that_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(config(steps=1, size=2), tmp_path)
        async with site.opened() as ring:

            async def life() -> None:
                looks = 0
                while (batch := await ring.system.take_within(0, seconds=0)) is None:
                    looks += 1
                    await asyncio.sleep(0.5)
                assert looks > 0 and len(batch.rewards) == 4
                again = await ring.system.take_within(0, seconds=0)
                assert again is not None and again.lease == batch.lease

            await ring.serve(life())

    run_virtual(main)


def test_a_run_whose_workers_are_all_gone_is_not_ended_and_its_report_says_what_it_waits_for(tmp_path: Path) -> None:
    """The launcher's part is played by the watchdog itself."""

    async def main() -> tuple[str, str]:
        environment = Claimed()
        site = Site(config(steps=2), tmp_path, agents=environment, sdk=True)
        async with site.opened() as ring:
            loop = asyncio.get_running_loop()
            standing = RolloutStanding(ring.serving, clock=loop.time)
            standing.watch(ring.agents, ring.system.queue, placement=environment.board.placement, board=environment.board)
            dog = Watchdog(stall_seconds=10, work=lambda pid: ProcessWork(0, 0, "S"), clock=loop.time)
            told: list[tuple[str, str]] = []

            async def launcher() -> None:
                dog.begin("trainer", 0)
                dog.begin("rollout", 1)
                for _ in range(3600):
                    await asyncio.sleep(1)
                    found = standing.now()
                    dog.hear("trainer", Beat(loop.time(), (Doing("waits for groups of version 0", 0.0, whom="rollout"),)))
                    dog.hear("rollout", Beat(loop.time(), found.doing, found.absences, found.counters))
                    assert not dog.look(), "nothing hangs, and an hour is no reason"
                    if dog.due():
                        told.append((dog.standstill(), dog.report()))

            await ring.serve(launcher())
            return told[0]

    standstill, report = run_virtual(main, seed=0)
    assert "trainer waits for rollout, which waits for a worker outside" in standstill
    assert "rollouts wait to be claimed, the oldest for" in report and "no worker has claimed one so far" in report
