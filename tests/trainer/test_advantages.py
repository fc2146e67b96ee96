"""From rewards to advantages, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midflight.trainer.formulas.advantages import (
    batch_normalised,
    decoupled_advantages,
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    maxrl_advantages,
    overlong_penalty,
    reinforce_pp_advantages,
    rloo_advantages,
    turn_advantages,
)

from .tensors import of, whole

OF_GROUPS = [grpo_advantages, dr_grpo_advantages, rloo_advantages, reinforce_pp_advantages, maxrl_advantages]


def test_grpo_divides_by_the_deviation_with_n_minus_one() -> None:
    # Rewards 1, 0, 0.5: mean 0.5, deviations .5, -.5, 0, variance (.25 + .25) / 2, std .5.
    found = grpo_advantages(of(1, 0, 0.5), torch.tensor([0, 0, 0]))
    assert found.tolist() == pytest.approx([0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6), 0.0])


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # 1 against (0 + .5) / 2; 0 against (1 + .5) / 2; .5 against (1 + 0) / 2. In the other group 3 against 1.
    found = rloo_advantages(of(1, 3, 0, 0.5, 1), torch.tensor([0, 1, 0, 0, 1]))
    assert found.tolist() == pytest.approx([0.75, 2.0, -0.75, 0.0, -2.0])


def test_reinforce_pp_divides_by_the_deviation_of_the_batch() -> None:
    # Less their groups' means: .5, -.5, 2, -2. Their mean is 0, their variance (.25 + .25 + 4 + 4) / 3.
    found = reinforce_pp_advantages(of(1, 0, 4, 0), torch.tensor([0, 0, 1, 1]))
    deviation = math.sqrt(8.5 / 3)
    assert found.tolist() == pytest.approx([0.5 / deviation, -0.5 / deviation, 2 / deviation, -2 / deviation])


def test_maxrl_divides_by_the_mean_so_that_a_rare_success_weighs_more() -> None:
    # One of four solves it: mean .25, (1 - .25) / .25 = 3 and -1. Three of four: mean .75, a third and -1. None of two: nothing.
    found = maxrl_advantages(of(1, 0, 0, 0, 1, 1, 1, 0, 0, 0), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2]))
    assert found.tolist() == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0])


def test_equal_rewards_whose_mean_rounds_to_another_number_have_no_advantage() -> None:
    # (.1 + .1 + .1) / 3 is .10000000000000002: in deviations of 1e-17 that would be -1e-11, and a gradient.
    for advantages in OF_GROUPS:
        assert advantages(of(0.1, 0.1, 0.1), torch.tensor([0, 0, 0])).tolist() == [0.0] * 3


@pytest.mark.parametrize("advantages", OF_GROUPS)
def test_a_group_without_spread_or_with_one_rollout_has_no_advantage(advantages: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert advantages(of(1, 1, 1, 7), torch.tensor([0, 0, 0, 1])).tolist() == [0.0] * 4


@pytest.mark.parametrize("advantages", OF_GROUPS)
@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_becomes_no_advantage_and_counts_for_no_other(
    advantages: Callable[[Tensor, Tensor], Tensor], missing: float
) -> None:
    found = advantages(of(1, missing, 0, 3, 5, missing), torch.tensor([0, 0, 0, 1, 1, 2]))
    without = advantages(of(1, 0, 3, 5), torch.tensor([0, 0, 1, 1]))
    assert found[[1, 5]].tolist() == [0.0, 0.0]
    assert found[[0, 2, 3, 4]].tolist() == pytest.approx(without.tolist())


@pytest.mark.parametrize("advantages", OF_GROUPS)
def test_whole_numbers_are_rewards_like_any_other(advantages: Callable[[Tensor, Tensor], Tensor]) -> None:
    groups = torch.tensor([0, 0, 0])
    assert advantages(torch.tensor([1, 0, 4]), groups).tolist() == pytest.approx(advantages(of(1, 0, 4), groups).tolist(), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, math.nan]), st.integers(0, 2)), min_size=1, max_size=9))
def test_advantages_of_a_group_add_up_to_nothing(drawn: list[tuple[float, int]]) -> None:
    rewards, groups = of(*(reward for reward, _ in drawn)), torch.tensor([group for _, group in drawn])
    for advantages in OF_GROUPS:
        found = advantages(rewards, groups)
        assert found.isfinite().all()
        assert all(abs(float(found[groups == group].sum())) < 1e-9 for group in range(3))


def test_a_batch_is_normalised_with_n_minus_one() -> None:
    assert batch_normalised(of(1, 2, 3)).tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert batch_normalised(of(2, 2)).tolist() == [0.0, 0.0]


def test_generalised_advantages_by_hand_for_tokens_in_any_place() -> None:
    # Rollout 0 has steps at 3, 7, 9 with rewards 0, 0, 1 and values .5, .25, .75; discount .9, decay .5.
    # delta: 1 - .75 = .25; .9 * .75 - .25 = .425; .9 * .25 - .5 = -.275.
    # A: .25; .425 + .45 * .25 = .5375; -.275 + .45 * .5375 = -.033125. Rollout 1 has one step: 2 - 1.
    rewards, values = of(1, 0, 2, 0), of(0.75, 0.5, 1, 0.25)
    advantages, returns = gae(rewards, values, position=torch.tensor([9, 3, 0, 7]), **whole(0, 0, 1, 0), discount=0.9, decay=0.5)
    assert advantages.tolist() == pytest.approx([0.25, -0.033125, 1.0, 0.5375])
    assert returns.tolist() == pytest.approx([1.0, 0.466875, 2.0, 0.7875])


def test_without_decay_or_discount_an_advantage_is_what_is_still_to_come_minus_the_value() -> None:
    advantages, returns = gae(of(1, 2, 4), of(9, 9, 9), position=torch.arange(3), **whole(0, 0, 0), discount=1.0, decay=1.0)
    assert returns.tolist() == pytest.approx([7.0, 6.0, 4.0]) and advantages.tolist() == pytest.approx([-2.0, -3.0, -5.0])


def test_a_rollout_with_a_missing_reward_has_no_generalised_advantage() -> None:
    advantages, returns = gae(
        of(0, math.nan, 1), of(0.5, 0.5, 0.5), position=torch.tensor([0, 1, 0]), **whole(0, 0, 1), discount=1.0, decay=1.0
    )
    assert advantages.tolist() == [0.0, 0.0, 0.5] and returns.tolist() == [0.5, 0.5, 1.0]


def test_overlong_penalty_grows_over_the_buffer() -> None:
    found = overlong_penalty(torch.tensor([10, 20, 0, 90]), buffer=20, penalty=1.0)
    assert found.tolist() == pytest.approx([-0.5, 0.0, -1.0, 0.0])
    assert overlong_penalty(torch.tensor([0]), buffer=0, penalty=1.0).tolist() == [0.0]


def test_components_are_compared_by_themselves_then_weighted_then_divided_by_the_deviation_of_the_batch() -> None:
    # One group of two. Component a: 1, 0; component b: 0, 10, twenty times the spread. By itself each is +-.5 / std(.5 sqrt 2) = +-sqrt(.5).
    components = torch.tensor([[1.0, 0.0], [0.0, 10.0], [3.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    found = decoupled_advantages(components, torch.tensor([0, 0, 1, 1]), weights=of(2.0, 1.0))
    root = math.sqrt(0.5)
    summed = [2 * root - root, -2 * root + root, 2 * root, -2 * root]  # b has no spread in the second group
    deviation = math.sqrt(sum(x * x for x in summed) / 3)
    assert found.tolist() == pytest.approx([x / deviation for x in summed], rel=1e-5)


def test_a_component_that_does_not_apply_counts_for_nobody() -> None:
    components = torch.tensor([[1.0, math.nan], [0.0, 5.0], [0.5, 7.0], [math.nan, math.nan]], dtype=torch.float64)
    found = decoupled_advantages(components, torch.tensor([0, 0, 0, 0]), weights=of(1.0, 1.0))
    # a among 1, 0, .5: 1, -1, 0 in deviations of .5. b among 5, 7: -sqrt(.5), sqrt(.5). The last has none, and is not counted.
    summed = [1.0, -1 - math.sqrt(0.5), math.sqrt(0.5)]
    mean = sum(summed) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in summed) / 2)
    assert found.tolist() == pytest.approx([*((x - mean) / deviation for x in summed), 0.0], rel=1e-5)


def test_an_answer_is_compared_by_what_is_still_to_come_from_it_on() -> None:
    # Whole rewards 1, 1. The first rollout earned .5 with its first answer and -1 with its second, the other one nothing.
    earned = torch.tensor([[0.5, -1.0], [0.0, 0.0]], dtype=torch.float64)
    groups = torch.tensor([0, 0])
    found = turn_advantages(lambda values: dr_grpo_advantages(values, groups), of(1, 1), earned)
    # To come: 1, 1; then .5, 1; then 1.5, 1. Less the mean of the two.
    assert found.tolist() == [[0.0, -0.25, 0.25], [0.0, 0.25, -0.25]]


@pytest.mark.parametrize("advantages", OF_GROUPS)
def test_where_no_answer_earned_anything_every_answer_has_the_advantage_of_its_rollout(
    advantages: Callable[[Tensor, Tensor], Tensor],
) -> None:
    rewards, groups = of(1, 0, 0.5), torch.tensor([0, 0, 0])
    found = turn_advantages(lambda values: advantages(values, groups), rewards, torch.zeros(3, 2, dtype=torch.float64))
    assert found.tolist() == [[a, a, a] for a in advantages(rewards, groups).tolist()]
