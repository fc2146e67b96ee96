"""What a step makes of a batch that says more than one reward for each rollout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from midflight.errors import RunFailed
from midflight.trainer.credit import Scoring
from midflight.trainer.critic import Valuation
from midflight.trainer.tokens import LossTokens, step_tokens
from midflight.types import PackedBatch

from .fixtures import batch, tiny_model, trainer


def pair() -> PackedBatch:
    """One group of two rollouts of four trained tokens each, two of either answer; rewards 1 and 0."""
    count = np.arange(10, dtype=np.int32)
    mask = np.array([False, True, True, True, True] * 2)
    turns = np.array([0, 0, 0, 1, 1] * 2, dtype=np.int32)
    zeros = np.zeros(10, np.int32)
    return replace(
        batch(num_groups=1, group_size=2),
        token_ids=count,
        loss_mask=mask,
        logprobs=np.full(10, -1.0, np.float32),
        versions=zeros,
        kv_versions=zeros,
        row_offsets=np.array([0, 5, 10], np.int32),
        row_rollout=np.array([0, 1], np.int32),
        rewards=np.array([1.0, 0.0], np.float32),
        rollout_group=np.array([0, 0], np.int32),
        truncated=np.array([False, False]),
        turns=turns,
        turn_rewards=np.array([0.75, 0.25, 0.0, 0.0], np.float32),
    )


def tokens_of(data: PackedBatch, scoring: Scoring) -> LossTokens:
    return step_tokens(data, scoring, max_staleness=4, max_missing_share=0.1, dtype=torch.float64, device=torch.device("cpu"))


def test_each_answers_tokens_get_the_advantage_of_what_was_still_to_come() -> None:
    # To come at the first answer: 1 and 0; at the second .25 and 0. Less the means of the group.
    assert tokens_of(pair(), Scoring("dr_grpo")).advantage.tolist() == [0.5, 0.5, 0.125, 0.125, -0.5, -0.5, -0.125, -0.125]


def test_a_critic_is_told_of_each_reward_with_the_last_token_of_the_answer_that_earned_it() -> None:
    ours = trainer(tiny_model(), scoring=Scoring("gae"), valuation=Valuation())
    assert ours.critic is not None
    judged = ours.critic.judge(tokens_of(pair(), Scoring("gae")))
    # A critic that knows nothing yet expects 0, so the return of a token is the sum of rewards from it on: 1 before .75 came, then .25.
    assert judged.returns.tolist() == [1.0, 1.0, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0]


def test_components_are_weighed_by_the_name_before_the_slash_and_a_penalty_is_one_of_them() -> None:
    names, table = ("f/a", "g"), np.array([[1.0, 5.0], [0.0, 6.0]], np.float32)
    data = replace(pair(), turns=None, turn_rewards=None, components=table.ravel(), component_names=names, room=np.array([0, 9], np.int32))
    scoring = Scoring("grpo", component_weights={"f": 3.0}, overlong_buffer=4, overlong_penalty=0.5)
    found = tokens_of(data, scoring).advantage
    # In deviations: f/a +-, g -+, the penalty -+ (the first used all of its room): 3 - 1 - 1 = 1 of each, then +-sqrt(.5) over the batch.
    assert found.tolist() == pytest.approx([0.5**0.5] * 4 + [-(0.5**0.5)] * 4, rel=1e-5)


def test_rollouts_without_components_are_compared_by_their_rewards() -> None:
    found = tokens_of(replace(pair(), turns=None, turn_rewards=None), Scoring("grpo", component_weights={})).advantage
    assert found.tolist() == pytest.approx([0.5**0.5] * 4 + [-(0.5**0.5)] * 4, rel=1e-5)


def test_rewards_of_answers_are_refused_where_whole_rollouts_are_compared() -> None:
    scoring = Scoring("grpo", component_weights={}, whole_rollouts='objective.normalise = "component"')
    with pytest.raises(RunFailed, match=r'objective\.normalise = "component" takes one advantage for a whole rollout. Remove that option'):
        tokens_of(pair(), scoring)


def test_a_step_reports_the_mean_of_each_component_over_the_rollouts_that_it_applies_to() -> None:
    data = batch(num_groups=1, group_size=2)
    data = replace(data, components=np.array([1.0, np.nan, 0.0, 4.0], np.float32), component_names=("right", "short"))
    metrics = trainer(tiny_model()).step(data).metrics
    assert (metrics["reward/right"], metrics["reward/short"]) == (0.5, 4.0)
