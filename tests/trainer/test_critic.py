"""Generalised advantages with a critic: what a step trains on, that it is the same however it is split, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.tiny import tiny_adapted

from midflight.config import load_config
from midflight.config.loss_text import effective_loss
from midflight.errors import ConfigError
from midflight.trainer.checkpoint import load_checkpoint
from midflight.trainer.credit import Scoring
from midflight.trainer.critic import Critic, Valuation, value_model_of
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.report import Skip
from midflight.trainer.tokens import LossTokens, step_tokens
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types import PackedBatch

from .fixtures import batch, save_checkpoint, tiny_model, trainer, weights, with_rows_in_order

SCORING = Scoring("gae")
CPU = torch.device("cpu")


def judged(valuation: Valuation | None = None, *, seed: int = 0, **options: Any) -> PolicyTrainer:
    return trainer(tiny_model(seed=seed), scoring=SCORING, valuation=valuation or Valuation(), **options)


def critic_of(ours: PolicyTrainer) -> Critic:
    assert ours.critic is not None
    return ours.critic


def values_of(ours: PolicyTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in critic_of(ours).model.parameters()])


def tokens_of(data: PackedBatch) -> LossTokens:
    return step_tokens(data, SCORING, max_staleness=4, max_missing_share=0.1, dtype=torch.float64, device=CPU)


def told_by_its_prompt(*, seed: int, version: int) -> PackedBatch:
    """The first token of a row tells the reward."""
    data = batch(seed=seed, version=version)
    data.token_ids[data.row_offsets[:-1]] = 40 + data.rewards[data.row_rollout].astype(int)
    return data


def test_a_critic_that_knows_nothing_yet_leaves_the_reward_in_deviations_of_the_tokens() -> None:
    tokens = tokens_of(batch())
    found = critic_of(judged()).judge(tokens)
    assert not found.values.any() and torch.equal(found.returns, tokens.advantage)
    assert torch.allclose(found.tokens.advantage, (tokens.advantage - tokens.advantage.mean()) / tokens.advantage.std())


def test_the_reward_comes_with_the_last_token_of_a_rollouts_last_row() -> None:
    tokens = tokens_of(batch())
    first = tokens.rollout == 0
    assert len(set(tokens.predictions.row[first.numpy()])) == 2, "it has two rows"
    found = critic_of(judged(Valuation(discount=0.5))).judge(tokens)
    expected = [float(tokens.advantage[first][0]) * 0.5**n for n in range(int(first.sum()))][::-1]
    assert float(found.returns[first].sum()) > 0 and found.returns[first].tolist() == pytest.approx(expected)


def test_a_value_is_of_the_state_before_its_token() -> None:
    ours, data = judged(), batch()
    with torch.no_grad():
        critic_of(ours).model.weight.normal_()
    before = critic_of(ours).judge(tokens_of(data))
    last = data.row_offsets[-1] - 1
    assert data.loss_mask[last]
    data.token_ids[last] = (data.token_ids[last] + 1) % 262
    assert torch.equal(critic_of(ours).judge(tokens_of(data)).values, before.values), "nothing is predicted after the last token"
    data.token_ids[last - 1] = (data.token_ids[last - 1] + 1) % 262
    changed = critic_of(ours).judge(tokens_of(data)).values != before.values
    assert changed.nonzero().flatten().tolist() == [len(changed) - 1]


def test_a_critic_learns_what_the_prompt_tells() -> None:
    ours = judged(Valuation(learning_rate=1e-2), learning_rate=1e-9)
    told = [ours.step(told_by_its_prompt(seed=version % 2, version=version)).metrics for version in range(20)]
    assert told[0]["critic/explained_variance"] == pytest.approx(0.0) and told[0]["critic/value_mean"] == 0
    assert told[-1]["critic/explained_variance"] > 0.8
    assert told[-1]["critic/loss"] < told[0]["critic/loss"] / 5


def test_a_constant_reward_is_learned_and_then_gives_no_advantage() -> None:
    ours = judged(Valuation(learning_rate=1e-2), learning_rate=1e-9)
    data = batch(num_groups=1)
    data.rewards[:] = 1.0
    told = [ours.step(replace(data, train_version=v, versions=np.full_like(data.versions, v))).metrics for v in range(20)]
    assert told[0]["critic/loss"] == pytest.approx(0.5) and told[-1]["critic/loss"] < 0.05
    assert told[-1]["critic/value_mean"] == pytest.approx(1, abs=0.1)
    assert "critic/explained_variance" not in told[-1], "there is no variance to explain"


def move(data: PackedBatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """How one step of plain gradient descent changes policy and critic, and what it reports."""
    ours = judged(Valuation(discount=0.9, trace_decay=0.8, clip=0.01), max_grad_norm=1e9, updates_per_step=2, **options)
    critic = critic_of(ours)
    with torch.no_grad():
        critic.model.weight.normal_(generator=torch.Generator().manual_seed(0))
    begun = weights(ours.model), values_of(ours)
    ours.optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.1)  # type: ignore[assignment]
    critic.optimizer = torch.optim.SGD(critic.model.parameters(), lr=0.1)  # type: ignore[assignment]
    report = ours.step(data)
    return weights(ours.model) - begun[0], values_of(ours) - begun[1], dict(report.metrics)


def test_neither_gradient_depends_on_packing_split_or_recomputation() -> None:
    data = batch()
    reordered = with_rows_in_order(data, [*reversed(range(2, len(data.row_rollout))), 0, 1])  # rows of one rollout keep their order
    policy, critic, metrics = move(data)
    assert float(policy.norm()) > 1e-6 and float(critic.norm()) > 1e-6
    for source, options in (
        (data, {"micro_batch_tokens": 40}),
        (data, {"activation_checkpointing": True}),
        (reordered, {"micro_batch_tokens": 70}),
    ):
        found = move(source, **options)
        assert float((found[0] - policy).norm() / policy.norm()) < 1e-12
        assert float((found[1] - critic).norm() / critic.norm()) < 1e-12
        names = [name for name in metrics if name.startswith("critic/")]
        assert len(names) == 4 and [found[2][n] for n in names] == pytest.approx([metrics[n] for n in names], rel=1e-10)


def test_a_resumed_critic_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    straight, first, second = judged(), judged(), judged(seed=99)
    for v in range(4):
        straight.step(batch(seed=v, version=v))
    for v in range(2):
        first.step(batch(seed=v, version=v))
    load_checkpoint(save_checkpoint(tmp_path, first, cursor="", keep=1), second)
    for v in range(2, 4):
        second.step(batch(seed=v, version=v))
    assert torch.equal(weights(second.model), weights(straight.model)) and torch.equal(values_of(second), values_of(straight))


def test_a_checkpoint_with_a_critic_is_not_taken_up_without_one_nor_the_other_way(tmp_path: Path) -> None:
    plain = trainer(tiny_model())
    with pytest.raises(ConfigError, match=r"has a critic, and this run has none\. Set objective\.advantage"):
        load_checkpoint(save_checkpoint(tmp_path / "a", judged(), cursor="", keep=1), plain)
    with pytest.raises(ConfigError, match=r'has no critic, and objective\.advantage is "gae"'):
        load_checkpoint(save_checkpoint(tmp_path / "b", plain, cursor="", keep=1), judged())


def test_of_a_policy_with_adapters_the_critic_trains_adapters_and_its_head() -> None:
    model = value_model_of(tiny_adapted())
    names = [name for name, _ in named_parameters(model)]
    assert {"weight", "bias"} < set(names) and all("lora_" in name for name in names if name not in ("weight", "bias"))


def test_a_batch_without_tokens_to_train_on_leaves_the_critic_alone() -> None:
    ours, data = judged(), batch()
    data.rewards[:] = np.nan
    before = values_of(ours)
    report = ours.step(data)
    assert report.skipped is Skip.NO_TOKENS and torch.equal(values_of(ours), before)


def test_bfloat16_forwards_give_values_in_full_precision() -> None:
    ours = trainer(tiny_model(torch.float32), scoring=SCORING, valuation=Valuation(), compute_dtype=torch.bfloat16)
    assert [ours.step(batch(version=v)).skipped for v in range(2)] == [None, None]
    found = critic_of(ours).judge(tokens_of(batch()))
    assert found.values.dtype == torch.float32 and not torch.equal(found.values, found.values.bfloat16().float())


def test_the_configuration_makes_the_critic_it_names() -> None:
    config = load_config(
        None, ["objective.advantage=gae", "critic.learning_rate=1e-2", "critic.discount=0.9", "critic.trace_decay=0.5", "critic.clip=3"]
    )
    ours = trainer_of(config, tiny_model(torch.float32))
    assert critic_of(ours)._valuation == Valuation(learning_rate=1e-2, discount=0.9, trace_decay=0.5, clip=3)
    text = "\n".join(effective_loss(config))
    assert "Â_t = δ_t + 0.45 Â_t+1,  δ_t = 0.9 V_t+1 - V_t" in text and "V_start ± 3" in text
    assert trainer_of(load_config(None), tiny_model(torch.float32)).critic is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["critic.discount=0.9"], 'critic.discount (0.9) does nothing with objective.advantage = "grpo"'),
        (["objective.advantage=gae", "objective.kind=gmpo"], "takes one advantage for a whole rollout"),
        (["objective.advantage=gae", "correction.opsm=0.1"], "goes by the sign of a whole rollout's advantage"),
        (["objective.advantage=gae", "objective.kind=mirror_descent"], "is derived for reward - mean"),
        (["objective.advantage=gae", "distillation.teacher=/x"], "has no place for what distillation.teacher says"),
    ],
)
def test_options_that_cannot_hold_beside_a_critic_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert expected in str(caught.value)
