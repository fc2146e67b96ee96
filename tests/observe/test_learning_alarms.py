"""What is said of groups that are all alike, of answers that are cut short, and of first steps that go too far."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.facts import Facts
from tests.observe.facts import Clock, rollout

from midflight.observe.alarms import Alarms
from midflight.observe.learning_alarms import MIN_GROUPS, MIN_ROLLOUTS, LearningOptions, lower_rate
from midflight.trainer.formulas.diagnostics import alarms
from midflight.types import Group, GroupKey, Reason, RolloutKey, Trajectory
from midflight.types.facts import Alarmed, Fact, GroupClosed, GroupFinished, Stepped

OPTIONS = LearningOptions(group_size=4, groups_per_step=2, max_tokens=16, max_context=256, learning_rate=3e-4, usual_rate=2e-5)


class Watched:
    """Alarms of a run with these options, and what they said."""

    def __init__(self, **options: object) -> None:
        self.facts = Facts()
        self.alarms = Alarms(self.facts.apply, learning=replace(OPTIONS, **options), clock=Clock())  # type: ignore[arg-type]

    def apply(self, fact: Fact) -> None:
        self.alarms.apply(fact)

    def group(self, *rewards: float) -> None:
        key = GroupKey(0, 1)
        members = tuple(Trajectory(RolloutKey(key, n), "1", "sums", reward, ()) for n, reward in enumerate(rewards))
        self.apply(GroupFinished(Group(key, "1", "sums", members), 0))

    def said(self, name: str) -> list[str]:
        return [alarm.text for alarm in self.facts.of(Alarmed) if alarm.name == name]


# --- Groups -----------------------------------------------------------------------------------------------------------


def test_groups_that_are_mostly_too_hard_are_said_with_their_share_and_what_to_change() -> None:
    watched = Watched()
    for number in range(MIN_GROUPS):
        watched.group(*((0.0, 1.0, 0.0, 0.0) if number % 5 == 4 else (0.0,) * 4))
    (said,) = watched.said("groups_alike")
    assert said.startswith("13 of the last 16 groups (81%) had one reward for all their answers, 0.000 in the mean: ")
    assert "what it cost is lost" in said and "Most are too hard: take easier tasks" in said
    assert 'curriculum.priority = "learnability"' in said and "rollout.drop_zero_spread = true" in said
    assert "raise rollout.group_size (4, 8 would be next)" in said


def test_groups_that_are_mostly_too_easy_ask_for_harder_tasks_and_not_for_more_answers() -> None:
    watched = Watched()
    for number in range(MIN_GROUPS):
        watched.group(*((0.0, 1.0, 0.0, 0.0) if number % 4 == 3 else (1.0,) * 4))
    (said,) = watched.said("groups_alike")
    assert "(75%)" in said and "Most are too easy: take harder tasks" in said and "group_size" not in said


def test_a_run_that_has_learned_its_tasks_is_no_alarm() -> None:
    """As the demo from step 152 on: it was right in 0.5 of the first groups and is in nearly all of the last ones."""
    watched = Watched()
    for _ in range(MIN_GROUPS):
        watched.group(0.0, 1.0, 0.0, 1.0)
    for _ in range(2 * MIN_GROUPS):
        watched.group(1.0, 1.0, 1.0, 1.0)
    assert not watched.facts
    for _ in range(MIN_GROUPS):
        watched.group(0.0, 0.0, 0.0, 0.0)
    assert watched.said("groups_alike"), "what it has forgotten again is one"


def test_what_is_set_already_is_not_advised() -> None:
    watched = Watched(draws_by_pass_rate=True, draws_others=True)
    watched.group(0.0, 1.0, 0.0, 0.0)
    for _ in range(MIN_GROUPS - 1):
        watched.apply(GroupClosed(GroupKey(0, 1), Reason.ZERO_SPREAD, 20, alike="failed"))
    (said,) = watched.said("groups_alike")
    assert "others were drawn in their place" in said and "curriculum" not in said and "drop_zero_spread" not in said


def test_groups_without_any_difference_question_the_reward_too() -> None:
    watched = Watched()
    for _ in range(MIN_GROUPS):
        watched.group(0.0, 0.0, 0.0, 0.0)
    assert "does the reward not look at the answer?" in watched.said("groups_alike")[0]


@pytest.mark.parametrize("options", [{"compares": False}, {"groups_per_step": 40}])
def test_few_groups_and_groups_that_are_not_compared_are_no_alarm(options: dict[str, object]) -> None:
    watched = Watched(**options)
    for _ in range(2 * MIN_GROUPS):
        watched.group(0.0, 0.0, 0.0, 0.0)
    assert not watched.facts


def test_two_thirds_of_the_groups_alike_are_no_alarm() -> None:
    watched = Watched()
    for number in range(100):
        watched.group(*((0.0, 1.0, 0.0, 0.0) if number % 3 == 0 else (0.0,) * 4))
    assert not watched.said("groups_alike")


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_answers_cut_by_their_limit_name_it_and_the_next_larger_one() -> None:
    watched = Watched()
    for number in range(MIN_ROLLOUTS):
        cut = number % 10 < 7
        rollout(watched, 0.0, num_tokens=16 if cut else 12, truncated=cut)
    (said,) = watched.said("answers_cut")
    # Of 32 rollouts 3 x 7 and 2 more were cut.
    assert said.startswith("23 of the last 32 rollouts (72%) were cut short; those that ended by themselves had at most 12 tokens.")
    assert "Raise environment.max_tokens (16, 32 would be next)" in said and "model.max_context" not in said
    assert "objective.mask_truncated = true" in said


def test_answers_cut_by_the_context_ask_for_a_larger_one() -> None:
    watched = Watched(max_tokens=200, masks_truncated=True)
    for _ in range(MIN_ROLLOUTS):
        rollout(watched, 0.0, num_tokens=150, truncated=True)
    (said,) = watched.said("answers_cut")
    assert "none ended by itself" in said and "raise model.max_context (256)" in said and "mask_truncated" not in said


def test_a_limit_that_fills_the_context_is_raised_with_it() -> None:
    watched = Watched(max_tokens=100)
    for _ in range(MIN_ROLLOUTS):
        rollout(watched, 0.0, num_tokens=100, truncated=True)
    assert "environment.max_tokens (100, 200 would be next), with model.max_context (256)" in watched.said("answers_cut")[0]


def test_a_fifth_of_the_answers_cut_is_no_alarm() -> None:
    watched = Watched()
    for number in range(200):
        rollout(watched, 0.0, num_tokens=16, truncated=number % 5 == 4)
    assert not watched.said("answers_cut")


# --- Steps ------------------------------------------------------------------------------------------------------------


def test_first_steps_that_go_too_far_name_the_learning_rate_and_one_to_begin_again_with() -> None:
    watched = Watched()
    watched.apply(Stepped(1, 1, 0.0, 1.0, 5, {"rho/k1": 0.04, "rho/k3": 0.03}))
    assert not watched.facts
    alarm = ("k1 is 0.82, beyond 0.1",)
    watched.apply(Stepped(2, 2, 0.0, 1.0, 5, {"rho/k1": 0.82, "rho/k3": 0.6}, alarms=alarm))
    (said,) = watched.said("step_size")
    assert said.startswith(
        "the step to version 2: its policy is 0.820 nats from the one that sampled its batch (train/rho/k1, k3), after 0.040"
    )
    assert "Lower trainer.learning_rate (0.0003; a model of this size learns at about 2e-05)" in said
    assert "--overwrite --set trainer.learning_rate=2e-05" in said
    assert not watched.said("off_policy"), "one cause is said once"


def test_a_run_that_learns_quickly_is_no_alarm() -> None:
    """The demo's steps 15 to 20, in which it learns: six steps in a row are out of a bound, and the policy that samples is near all the same."""
    watched = Watched(learning_rate=4e-4, usual_rate=3e-4)
    readings = ((0.127, 0.494), (0.169, 2.119), (0.218, 0.292), (0.17, 1.483), (0.111, 0.664), (0.152, 1.539))
    for step, (divergence, deviation) in enumerate(readings, start=15):
        found = alarms({"rho/mean": 1.0, "rho/ess": 0.93, "rho/k1": divergence, "rho/std": deviation})
        assert found
        watched.apply(Stepped(step, step, 0.0, 1.0, 5, {"rho/k1": divergence, "rho/k3": divergence}, alarms=found))
    assert not watched.facts


def test_later_steps_and_those_of_another_trainer_are_off_policy_as_before() -> None:
    for options, version in (({}, 11), ({"learning_rate": None}, 2)):
        watched = Watched(**options)
        for step in range(8):
            assert not watched.said("off_policy")
            watched.apply(Stepped(1, version + step, 0.0, 1.0, 5, {"rho/k1": 0.5}, alarms=("k1 is 0.5, beyond 0.1",)))
        assert not watched.said("step_size") and "the last of 8 in a row: k1 is 0.5, beyond 0.1" in watched.said("off_policy")[0]


def test_a_rate_that_is_low_already_is_lowered_to_a_third() -> None:
    assert [lower_rate(*rates) for rates in ((3e-4, 2e-5), (2e-5, 2e-5), (1e-6, 2e-5), (4e-4, 3e-4))] == [2e-5, 7e-6, 3e-7, 3e-4]
