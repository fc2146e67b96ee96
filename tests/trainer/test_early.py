"""A step that starts before its batch is whole: the same step, whatever was begun, and in whatever order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from midflight.config.loss import ObjectiveSection
from midflight.trainer.credit import Scoring
from midflight.trainer.critic import Valuation
from midflight.trainer.objective import Objective
from midflight.types import PackedBatch

from .fixtures import batch, tiny_model, trainer, weights
from .test_exactness import aged, objective


def some(data: PackedBatch, *groups: int) -> PackedBatch:
    """These groups, in this order, as they come before their batch."""
    rollouts = np.concatenate([np.flatnonzero(data.rollout_group == group) for group in groups])
    rows = np.concatenate([np.flatnonzero(data.row_rollout == rollout) for rollout in rollouts])
    at = np.concatenate([np.arange(data.row_offsets[row], data.row_offsets[row + 1]) for row in rows])
    number = {old: new for new, old in enumerate(rollouts.tolist())}
    per_token = {name: getattr(data, name)[at] for name in ("token_ids", "loss_mask", "logprobs", "versions", "kv_versions")}
    per_rollout = {name: getattr(data, name)[rollouts] for name in ("rewards", "truncated")}
    return replace(
        data,
        lease=0,
        row_offsets=np.concatenate([[0], np.cumsum(np.diff(data.row_offsets)[rows])]).astype(np.int32),
        row_rollout=np.array([number[rollout] for rollout in data.row_rollout[rows].tolist()], np.int32),
        rollout_group=np.array([groups.index(group) for group in data.rollout_group[rollouts].tolist()], np.int32),
        **per_token,
        **per_rollout,
    )


def moved(data: PackedBatch, *parts: PackedBatch, loss: Objective | None = None, **options: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """How two steps of plain gradient descent change the weights, the first one begun with these parts; and what they reported."""
    model = tiny_model()
    start = weights(model)
    ours = trainer(model, loss, max_grad_norm=1e9, version=2, reference=tiny_model(seed=1), **options)
    ours.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
    for part in parts:
        ours.begin(part)
    metrics = {**ours.step(data).metrics, **{f"next {k}": v for k, v in ours.step(replace(data, train_version=3)).metrics.items()}}
    return weights(model) - start, metrics


def same(found: tuple[torch.Tensor, dict[str, float]], plain: tuple[torch.Tensor, dict[str, float]]) -> None:
    assert float((found[0] - plain[0]).norm() / plain[0].norm()) < 1e-12
    told = {name: value for name, value in found[1].items() if not name.endswith(("early_share", "micro_batches"))}
    assert told == pytest.approx({name: plain[1][name] for name in told}, rel=1e-9, abs=1e-12, nan_ok=True)


KINDS = ("default", "self-normalised sequence weights", "sapo, reference and entropy")


@pytest.mark.parametrize("name", KINDS)
def test_the_gradient_is_that_of_the_whole_batch_whatever_was_begun_of_it(name: str) -> None:
    data, loss = aged(), objective(name)
    plain = moved(data, loss=loss, updates_per_step=1)
    assert float(plain[0].norm()) > 1e-6 and plain[1]["step/early_share"] == 0
    for parts in ((some(data, 2),), (some(data, 2, 0), some(data, 1))):
        found = moved(data, *parts, loss=loss, micro_batch_tokens=90)
        same(found, plain)
        groups = [int(group) for part in parts for group in (2,) * (len(parts) == 1) or range(3)][: 1 if len(parts) == 1 else 3]
        share = np.isin(data.rollout_group[np.repeat(data.row_rollout, np.diff(data.row_offsets))], groups)[data.loss_mask].mean()
        assert found[1]["step/early_share"] == pytest.approx(share)
        assert found[1]["next step/early_share"] == 0


@pytest.mark.parametrize("reduction", ["sequence_mean", "constant"])
def test_each_reduction_gets_its_denominators_at_the_end(reduction: str) -> None:
    data, loss = aged(), Objective.of(ObjectiveSection.model_validate({"reduction": reduction}), constant_length=16)
    same(moved(data, some(data, 1), loss=loss), moved(data, loss=loss))


def test_the_mini_batches_of_a_step_have_log_probabilities_that_were_made_early() -> None:
    data = aged()
    options = {"updates_per_step": 3, "loss": objective("sapo, reference and entropy")}
    found = moved(data, some(data, 1), **options)
    same(found, moved(data, **options))
    assert 0 < found[1]["step/early_share"] < 1


@pytest.mark.parametrize("how", ["missing", "other reward", "other log-probability"])
def test_what_was_begun_is_thrown_away_where_the_batch_says_otherwise(how: str) -> None:
    data = aged()
    part = some(data, 1, 2)
    if how == "missing":
        part = some(batch(seed=7, version=2), 0)
    elif how == "other reward":
        part.rewards[0] += 1
    else:
        part.logprobs[np.flatnonzero(part.loss_mask)[3]] += 1
    found = moved(data, part)
    same(found, moved(data))
    assert found[1]["step/early_share"] == 0


def test_groups_that_are_alike_are_begun_and_counted_one_by_one() -> None:
    data = aged()
    first, second = some(data, 0), some(data, 1)
    offsets = np.concatenate(
        [
            second.row_offsets,
            first.row_offsets[1:] + second.row_offsets[-1],
            first.row_offsets[1:] + second.row_offsets[-1] + first.row_offsets[-1],
        ]
    )
    columns = ("token_ids", "loss_mask", "logprobs", "versions", "kv_versions", "rewards", "truncated")
    twice = replace(
        data,
        row_offsets=offsets.astype(np.int32),
        row_rollout=np.concatenate([second.row_rollout, first.row_rollout + 4, first.row_rollout + 8]),
        rollout_group=np.repeat([0, 1, 2], 4).astype(np.int32),
        **{name: np.concatenate([getattr(part, name) for part in (second, first, first)]) for name in columns},
    )
    plain = moved(twice)
    for parts, share in (((first,), 1), ((first, first), 2), ((first, first, first), 0)):
        found = moved(twice, *parts)
        same(found, plain)
        assert found[1]["step/early_share"] == pytest.approx(share * first.loss_mask.sum() / twice.loss_mask.sum())


def test_a_step_waits_where_a_group_cannot_be_judged_alone() -> None:
    model = tiny_model()
    assert trainer(model, micro_batch_tokens=77).early_tokens == 77
    assert not trainer(model, scoring=Scoring(advantage="reinforce_pp")).early_tokens
    assert not trainer(model, scoring=Scoring(component_weights={})).early_tokens
    assert not trainer(model, scoring=Scoring(teacher_weight=1.0)).early_tokens
    assert not trainer(model, scoring=Scoring(advantage="gae"), valuation=Valuation()).early_tokens
    whole = trainer(model, objective("gspo"), scoring=Scoring(advantage="gae"), valuation=Valuation())
    assert whole.early_tokens, "log-probabilities want no advantage"


def test_a_critic_learns_from_whole_batches_while_log_probabilities_are_made_early() -> None:
    data = aged()
    options: dict[str, Any] = {"scoring": Scoring(advantage="gae"), "valuation": Valuation(), "loss": objective("gspo")}
    same(moved(data, some(data, 0), **options), moved(data, **options))
