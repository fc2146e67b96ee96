"""The rollouts of one task: together, within the slots, retried a bounded number of times."""

from __future__ import annotations

import asyncio

import pytest

from midflight.environments.group import GroupRunner
from midflight.environments.single_turn import answer
from midflight.errors import ConfigError
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, Reason, RolloutKey

from .fakes import FakeClient, Rig, task

KEY = GroupKey(1, 4)


def groups(rig: Rig, *, slots: int = 1000, group_size: int = 8, retries: int = 1, **options) -> GroupRunner:
    return GroupRunner(
        rollouts=rig.runner(**options), slots=asyncio.Semaphore(slots), fates=rig.fates, group_size=group_size, retries=retries
    )


def test_a_group_has_its_samples_in_order_and_runs_them_at_once():
    rig = Rig(answer, client=FakeClient(seconds=2.0))

    async def main():
        trajectories = await groups(rig).run(KEY, task())
        return trajectories, asyncio.get_running_loop().time()

    trajectories, seconds = run_virtual(main)
    assert [t.key for t in trajectories] == [RolloutKey(KEY, i) for i in range(8)] and seconds == 2.0


def failing(times: int):
    """An environment whose first `times` rollouts fail."""
    left = times

    async def environment(task, client):
        nonlocal left
        await asyncio.sleep(1)
        if left:
            left -= 1
            raise ConnectionError("gateway gone")
        return 0.5

    return environment


def test_a_rollout_without_reward_is_tried_again_in_a_new_session_with_the_same_key():
    rig = Rig(failing(1))
    (trajectory,) = run_virtual(lambda: groups(rig, group_size=1).run(KEY, task()))
    assert trajectory.reward == 0.5
    assert [(s.session_id, s.key) for s in rig.sessions.opened] == [("s0", RolloutKey(KEY, 0)), ("s1", RolloutKey(KEY, 0))]


def test_i3_the_tokens_of_a_failed_attempt_are_dropped_when_it_is_tried_again():
    rig = Rig(failing(1))
    run_virtual(lambda: groups(rig, group_size=1).run(KEY, task()))
    assert rig.fates.discarded == {Reason.NO_REWARD: 3}


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_are_bounded_and_the_last_failure_stays(retries: int):
    rig = Rig(failing(100))
    (trajectory,) = run_virtual(lambda: groups(rig, group_size=1, retries=retries).run(KEY, task()))
    assert trajectory.reward is None and trajectory.error == "ConnectionError: gateway gone"
    assert len(rig.sessions.opened) == 1 + retries and rig.fates.discarded[Reason.NO_REWARD] == 3 * retries


def test_slots_bound_the_rollouts_of_all_groups_and_are_given_in_order():
    rig = Rig(answer)

    async def main():
        runner = groups(rig, slots=4, group_size=3)
        async with asyncio.TaskGroup() as group:
            for index in range(6):
                group.create_task(runner.run(GroupKey(0, index), task(index)))

    run_virtual(main)
    assert rig.sessions.most_open == 4
    keys = [session.key for session in rig.sessions.opened]
    assert keys == sorted(keys) and len(keys) == 18


def test_an_error_priced_at_the_run_ends_the_group_and_closes_every_session():
    async def environment(task, client):
        await asyncio.sleep(1)
        raise ConfigError("wrong")

    rig = Rig(environment)
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(lambda: groups(rig, group_size=4).run(KEY, task()))
    assert caught.group_contains(ConfigError) and not rig.sessions.open_now


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_rollouts_end_with_every_session_closed_once_under_any_interleaving(seed: int):
    count = 0

    async def mixed(task, client):
        nonlocal count
        count += 1
        kind = count % 10
        await asyncio.sleep(count % 7)
        if kind == 0:
            raise RuntimeError("broken")
        if kind == 1:
            await asyncio.Event().wait()
        return float("nan") if kind == 2 else float(kind == 3)

    rig = Rig(mixed)

    async def main():
        runner = groups(rig, slots=50, rollout_seconds=30.0)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(runner.run(GroupKey(0, i), task(i))) for i in range(125)]
        return [t for r in running for t in r.result()]

    trajectories = run_virtual(main, seed=seed)
    assert len(trajectories) == 1000 and not rig.sessions.open_now
    assert set(rig.sessions.closed.values()) == {1} and len(rig.sessions.closed) == len(rig.sessions.opened) == count
    assert rig.sessions.most_open == 50
    failed = [t for t in trajectories if t.reward is None]
    assert failed and all(t.error for t in failed)
    assert rig.fates.discarded[Reason.NO_REWARD] == 3 * (count - 1000)
