"""What of a rollout's time counts: its agent's own, and as a last bound all of it. On virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from midflight.config.bounds import RolloutBound, rollout_bound
from midflight.config.sections import EnvironmentSection
from midflight.environments.claimed import Claimed
from midflight.environments.group_scoring import GroupScorer
from midflight.environments.result_checks import UnscoredRollout
from midflight.errors import RolloutTimeout
from midflight.gateway.sessions.request_clock import RequestClock
from midflight.stopwatch import Stopwatch
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, RolloutKey, Task

from .fakes import Rig, task

KEY = RolloutKey(GroupKey(0, 5), 2)
OWN = pytest.mark.parametrize("own", [False, True])
"""With a task of the agent's own, and in that of the rollout."""


async def asks(clock: RequestClock, seconds: float) -> None:
    """One request that takes so long."""
    request = clock.begin()
    await asyncio.sleep(seconds)
    request.end()


def run(agent, *, rig: Rig | None = None, **options):
    """`agent` gets the clock of its session."""

    async def environment(task, client):
        return await agent(rig.sessions.clocks["s0"])

    rig = rig or Rig(None)
    rig.environment = environment
    return run_virtual(lambda: rig.runner(**options).run(KEY, task()))


@OWN
def test_requests_may_take_a_hundred_times_as_long_as_the_agent(own: bool) -> None:
    async def agent(clock: RequestClock) -> float:
        for _ in range(10):
            await asks(clock, 600)
            await asyncio.sleep(5)
        return 0.5

    trajectory = run(agent, own=own)
    assert (trajectory.reward, trajectory.error) == (0.5, None) and trajectory.seconds == pytest.approx(6050)


@OWN
def test_an_agent_that_sleeps_is_ended_at_its_own_seconds_wherever_its_requests_lie(own: bool) -> None:
    """30 s by itself, 200 s of requests, two of which overlap, and 30 s more by itself."""

    async def agent(clock: RequestClock) -> float:
        await asyncio.sleep(30)
        await asyncio.gather(asks(clock, 200), asks(clock, 150))
        await asyncio.Event().wait()
        return 1.0

    trajectory = run(agent, own=own)
    assert trajectory.reward is None and trajectory.seconds == pytest.approx(260)
    error = trajectory.error or ""
    assert "its agent took 60 s by itself (200 s of 2 requests left out), and environment.rollout_seconds is 60; raise it" in error


def test_an_agent_that_hangs_up_does_not_wait_any_more() -> None:
    async def agent(clock: RequestClock) -> float:
        request = clock.begin()
        await asyncio.sleep(100)
        request.end()
        request.end()
        await asyncio.Event().wait()
        return 1.0

    assert run(agent).seconds == pytest.approx(160)


def test_a_refusal_that_says_when_to_try_again_excuses_the_wait_for_that_long_and_no_longer() -> None:
    """50 s are told; the agent tries again after 20, is told 50 s once more, and then sleeps: 60 s after the 50."""

    async def agent(clock: RequestClock) -> float:
        clock.refused(50)
        await asyncio.sleep(20)
        clock.begin().end()
        clock.refused(50)
        await asyncio.Event().wait()
        return 1.0

    assert run(agent).seconds == pytest.approx(20 + 50 + 60)


def test_an_agent_that_begins_again_has_all_its_seconds_again() -> None:
    async def agent(clock: RequestClock) -> float:
        await asyncio.sleep(50)
        clock.begin_again()
        await asyncio.Event().wait()
        return 1.0

    assert run(agent).seconds == pytest.approx(110)


@dataclass
class Hosting:
    """Around the agents: what a test says of their time."""

    host: object
    waited: Stopwatch = field(default_factory=Stopwatch)
    tools: Stopwatch = field(default_factory=Stopwatch)

    async def run(self, task, session):
        return await self.host.run(task, session)  # type: ignore[attr-defined]

    def excused(self, session_id: str) -> float:
        return self.waited.seconds()

    def tool_seconds(self, session_id: str) -> float:
        return self.tools.seconds()


def hosted(agent, **options):
    rig = Rig(None)

    async def environment(task, client):
        return await agent(hosting, rig.sessions.clocks["s0"])

    async def main():
        nonlocal hosting
        hosting = Hosting(rig.agents())
        return await rig.runner(agents=hosting, **options).run(KEY, task())

    rig.environment = environment
    hosting = None
    return run_virtual(main)


def test_tools_within_their_limits_and_waits_for_a_place_are_left_out_and_told() -> None:
    async def agent(host: Hosting, clock: RequestClock) -> float:
        host.waited.start()
        await asyncio.sleep(100)
        host.waited.stop()
        host.tools.start()
        await asyncio.sleep(500)
        host.tools.stop()
        await asyncio.Event().wait()
        return 1.0

    trajectory = hosted(agent)
    assert 660 <= trajectory.seconds <= 660.7
    assert "(500 s of tools, 100 s without a place to run or a processor left out)" in (trajectory.error or "")


def test_what_is_excused_while_a_request_is_under_way_is_excused_once() -> None:
    async def agent(host: Hosting, clock: RequestClock) -> float:
        host.waited.start()
        await asks(clock, 100)
        host.waited.stop()
        await asyncio.Event().wait()
        return 1.0

    assert 160 <= hosted(agent).seconds <= 160.7


def test_a_busy_process_excuses_agents_that_run_in_it() -> None:
    delay = Stopwatch()

    async def agent(clock: RequestClock) -> float:
        delay.start()
        await asyncio.sleep(30)
        delay.stop()
        await asyncio.Event().wait()
        return 1.0

    assert 90 <= run(agent, delayed_seconds=delay.seconds).seconds <= 90.7


# --- The last bound -------------------------------------------------------------------------------------------------


@OWN
def test_an_agent_that_asks_for_ever_is_ended_by_the_last_bound(own: bool) -> None:
    async def agent(clock: RequestClock) -> float:
        while True:
            await asks(clock, 7)

    trajectory = run(agent, own=own, bound=lambda: RolloutBound(500))
    assert 500 <= trajectory.seconds <= 501
    error = trajectory.error or ""
    assert (
        "it took 500 s with 72 requests, and 500 s are the last bound: as environment.max_rollout_seconds says; set environment.max_rollout_seconds"
        in error
    )


def test_the_last_bound_does_not_count_time_without_engines_and_follows_what_is_measured() -> None:
    """One request, through an outage of 1000 s. The bound of 300 s becomes one of 200 s at 50 s."""
    outage = Stopwatch()

    async def agent(clock: RequestClock) -> float:
        clock.begin()
        outage.start()
        await asyncio.sleep(1000)
        outage.stop()
        await asyncio.Event().wait()
        return 1.0

    def bound() -> RolloutBound:
        return RolloutBound(300 if asyncio.get_running_loop().time() < 50 else 200)

    assert 1200 <= run(agent, bound=bound, outage_seconds=outage.seconds).seconds <= 1203


def test_the_derived_bound_is_four_times_what_the_work_should_take() -> None:
    """8 turns of 512 tokens at 2 tokens/s and 30 s of tools: 60 + 8 * (256 + 30) s = 2348 s."""
    loop = EnvironmentSection.model_validate({"tools": ["m:f"], "rewards": [{"entry": "m:r"}], "max_tokens": 512})
    found = rollout_bound(loop, tokens_per_second=2.0)
    assert found.seconds == 4 * 2348
    assert found.words == "4 x (60 s of its agent and 8 turns of 512 tokens at 2 tokens/s (measured) and 30 s of tools)"


def test_the_bound_of_an_agent_of_ones_own_allows_many_turns_and_twice_the_most_that_one_took() -> None:
    own = EnvironmentSection.model_validate({"entry": "m:f", "max_tokens": 10})
    assert rollout_bound(own).seconds == 4 * (60 + 100 * 10 / 1.0)
    assert rollout_bound(own, tokens_per_second=5.0, most_turns=80, longest_answer=50).seconds == 4 * (60 + 160 * 50 / 5)
    assert rollout_bound(EnvironmentSection(max_tokens=10)).seconds == 4 * (60 + 10)


def test_a_bound_that_is_set_stands() -> None:
    found = rollout_bound(EnvironmentSection(max_rollout_seconds=5.0), tokens_per_second=2.0)
    assert (found.seconds, found.words) == (5.0, "as environment.max_rollout_seconds says")


# --- Rollouts that are claimed, groups that are scored --------------------------------------------------------------


def test_a_rollout_that_waits_to_be_claimed_is_not_late_and_its_worker_has_all_its_seconds() -> None:
    environment = Claimed()
    rig = Rig(environment)
    rig.client.api_key = "s0.secret"  # type: ignore[attr-defined]

    async def main():
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(rig.runner().run(KEY, task()))
            await asyncio.sleep(1000)
            assert len(environment.board.claim(1)) == 1
        return running.result()

    trajectory = run_virtual(main)
    assert trajectory.reward is None and 1060 <= trajectory.seconds <= 1060.7


class Scorers:
    """Scores in `seconds`, after a wait for a place."""

    def __init__(self, *, waits: float, seconds: float) -> None:
        self.place = Stopwatch()
        self._waits, self._seconds = waits, seconds

    async def judge(self, task, attempts, *, name: str):
        self.place.start()
        await asyncio.sleep(self._waits)
        self.place.stop()
        await asyncio.sleep(self._seconds)
        return [1.0 for _ in attempts]

    def excused(self, session_id: str) -> float:
        return self.place.seconds()

    def tool_seconds(self, session_id: str) -> float:
        return 0.0


def scored(host: Scorers) -> object:
    async def main() -> object:
        judging = GroupScorer(host, seconds=60)  # type: ignore[arg-type]
        judging.joined(KEY.group)
        return await judging.settled(KEY, Task("17", "spell", {}), UnscoredRollout([], 0, [], {}, {}, {}))

    return run_virtual(main)


def test_scoring_may_wait_for_a_place_and_is_ended_when_it_takes_too_long_by_itself() -> None:
    assert scored(Scorers(waits=1000, seconds=59)).reward == 1.0  # type: ignore[attr-defined]
    with pytest.raises(RolloutTimeout, match=r"scoring its 1 completions took 60 s by itself .* raise it"):
        scored(Scorers(waits=1000, seconds=62))
