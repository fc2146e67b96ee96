"""What an environment says beside its reward: components, metrics, rewards of single answers, fields, and rewards that come late."""

from __future__ import annotations

import asyncio

import pytest

from midflight import Result
from midflight.environments.result_checks import checked_result
from midflight.errors import BadReward
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, RolloutKey

from .fakes import Rig, task

KEY = RolloutKey(GroupKey(0, 5), 2)


def run(environment, **options):
    rig = Rig(environment)
    return run_virtual(lambda: rig.runner(**options).run(KEY, task())), rig


def test_all_that_a_result_says_reaches_the_trajectory_and_the_observers():
    async def said(task, client):
        return Result(
            1.25, components={"right": 1, "short": 0.25, "n/a": None}, metrics={"calls": 2}, turns=[0.25], fields={"seed": 7, "log": "x"}
        )

    trajectory, rig = run(said)
    assert (trajectory.reward, trajectory.components, trajectory.turn_rewards) == (1.25, {"right": 1.0, "short": 0.25}, (0.25,))
    assert trajectory.fields == {"seed": 7, "log": "x"}
    assert trajectory.metrics == {"calls": 2.0, "fields/seed": 7.0}  # a field that is a number is shown too
    (seen,) = rig.observer.rollouts
    assert (seen.reward, seen.components, seen.metrics) == (1.25, {"right": 1.0, "short": 0.25}, trajectory.metrics)


def test_a_late_reward_is_waited_for_and_counts():
    async def judged_later():
        await asyncio.sleep(7)
        return 0.5

    async def environment(task, client):
        return Result(judged_later(), components={"judge": 0.5})

    trajectory, _ = run(environment)
    assert (trajectory.reward, trajectory.components, trajectory.seconds) == (0.5, {"judge": 0.5}, 7.0)


def test_i10_a_late_reward_that_does_not_come_by_the_deadline_is_no_reward():
    async def environment(task, client):
        return Result(asyncio.get_running_loop().create_future())

    trajectory, _ = run(environment, rollout_seconds=30.0)
    assert trajectory.reward is None and "its agent took 30 s by itself" in (trajectory.error or "")


def test_i10_more_rewards_than_answers_are_no_reward():
    async def environment(task, client):
        return Result(1.0, turns=[0.5, 0.5])

    trajectory, _ = run(environment)  # the session has one answer
    assert trajectory.reward is None and trajectory.turn_rewards == ()
    assert trajectory.error == (
        "BadReward: scoring task 17 of spell: turns has 2 rewards for 1 answers of the model; give one for each answer, in their order, or fewer."
    )


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (Result("yes"), "reward was 'yes', expected a finite number"),  # type: ignore[arg-type]
        (Result(1.0, components={"right": "yes"}), "component 'right' was 'yes'"),  # type: ignore[dict-item]
        (Result(1.0, components=[1.0]), "components is [1.0], expected a dict"),  # type: ignore[arg-type]
        (Result(1.0, metrics={"calls": float("nan")}), "metric 'calls' was nan"),
        (Result(1.0, turns=[0.5, None]), "the reward of turn 1 was None"),  # type: ignore[list-item]
        (Result(1.0, turns="12"), "turns is '12', expected a list"),  # type: ignore[arg-type]
        (Result(1.0, fields={"log": object()}), "fields cannot be written as JSON"),  # type: ignore[dict-item]
    ],
)
def test_i10_what_is_no_number_is_named_and_never_becomes_a_reward(result, said):
    with pytest.raises(BadReward, match="scoring task 17 of spell") as raised:
        checked_result(result, task=task())
    assert said in str(raised.value)
